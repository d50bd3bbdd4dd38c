import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker import precision
from vllm_tts_cache.speaker.precision import exact_float32, hold_exact_matmuls

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def reduced_precision():
    """What an operator gets with VLLM_FLOAT32_MATMUL_PRECISION=high."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def tf32():
    return (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def refused(told):
    return pytest.raises(EncodeError, match=told)


@contextmanager
def beside_an_encode():
    entered, left = threading.Event(), threading.Event()

    def encode():
        with exact_float32(CUDA):  # whose flags are there without a GPU
            entered.set()
            left.wait(60)

    with ThreadPoolExecutor(1) as pool, ExitStack() as ending:
        ending.callback(pool.submit(encode).result, 60)
        ending.callback(left.set)
        assert entered.wait(60)
        yield


def test_overlapping_blocks_keep_tf32_off_until_the_last_one_ends(reduced_precision):
    assert tf32() == (True, True)
    with ExitStack() as first:
        first.enter_context(beside_an_encode())
        with exact_float32(CUDA):
            first.close()
            assert tf32() == (False, False)
            assert torch.get_float32_matmul_precision() == "highest"
    assert tf32() == (True, True)
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.long  # to compile anything takes longer than most tests
def test_where_products_are_exact_an_encode_compiles_nothing_anew(reduced_precision):
    torch._dynamo.reset()
    hold_exact_matmuls(torch.bfloat16)
    counter = CompileCounter()
    decode = torch.compile(lambda x: torch.sin(x) + 1, backend=counter, dynamic=False)
    decode(torch.ones(4))
    with beside_an_encode():
        decode(torch.ones(4))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_gradients_and_autocast_are_off_inside_only():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact_float32(CPU):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            assert product.dtype == torch.float32
            assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()


# Torch's newer interface, through which operations follow their backend, and backends
# one setting for all.

B: Any = torch.backends
MATMUL = {CUDA: B.cuda.matmul, CPU: B.mkldnn.matmul}
CONV = {CUDA: B.cudnn.conv, CPU: B.mkldnn.conv}
EVERY = (B, B.cudnn, *MATMUL.values(), *CONV.values(), B.cudnn.rnn)

# What somebody may have set. By default convolutions on a GPU are short already.
ASKED_FOR_LESS = {
    "all": [(B, "tf32")],
    "all, in bfloat16": [(B, "bf16")],
    "the GPU": [(B.cudnn, "tf32")],
    "products on a GPU": [(MATMUL[CUDA], "tf32")],
    "convolutions on a GPU": [(CONV[CUDA], "tf32")],
    "all, and convolutions by themselves": [(B, "tf32"), (CONV[CUDA], "tf32")],
    "all but convolutions": [(B, "tf32"), (CONV[CUDA], "ieee")],
    "convolutions but not all": [(B, "ieee"), (CONV[CUDA], "tf32")],
    "products on a CPU": [(MATMUL[CPU], "bf16")],
    "convolutions on a CPU": [(CONV[CPU], "bf16")],
}


def read():
    """All that can be read of the process's flags."""
    return [setting.fp32_precision for setting in EVERY], old_interface()


def old_interface():
    """Raises what the older interface raises where the two disagree."""
    found = []
    for getter in (torch.get_float32_matmul_precision, tf32):
        try:
            found.append(getter())
        except RuntimeError:
            found.append(RuntimeError)
    return found


def is_exact(device):
    precisions = {MATMUL[device].fp32_precision, CONV[device].fp32_precision}
    return not precisions & {"tf32", "bf16"}


@contextmanager
def asked_for(settings):
    before = [setting.fp32_precision for setting in EVERY]
    for setting, asked in settings:
        setting.fp32_precision = asked
    try:
        yield
    finally:
        for setting, precision in zip(EVERY, before, strict=True):
            setting.fp32_precision = precision


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("asked", ASKED_FOR_LESS)
def test_float32_is_exact_however_less_was_asked_for_and_that_comes_back(asked, device):
    with asked_for(ASKED_FOR_LESS[asked]):
        before = read()
        assert not is_exact(CPU) or not is_exact(CUDA)
        for _ in range(2):
            with exact_float32(device), exact_float32(device):
                assert is_exact(device)
            assert read() == before


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("what", [MATMUL, CONV], ids=["matmul", "conv"])
def test_what_was_computed_while_somebody_set_a_flag_is_not_kept(device, what):
    setting = what[device]
    before = setting.fp32_precision
    try:
        with refused(r"in float32 are (tf32|bf16)"), exact_float32(device):
            setting.fp32_precision = "tf32"
    finally:
        setting.fp32_precision = before


def test_a_flag_that_cannot_be_turned_off_is_an_error(monkeypatch):
    """As a version of torch with other flags would have it."""
    monkeypatch.setattr(precision, "_turn_off", lambda _setting: lambda: None)
    flags, told = [(B.cudnn, "tf32")], "in float32 are tf32"
    with asked_for(flags), refused(told), exact_float32(CUDA):
        pytest.fail("the block was entered")
    assert tf32() == (False, True)
