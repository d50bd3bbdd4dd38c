"""What torch has compiled depends on how exact float32 matrix products are."""

import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from vllm_tts_cache.speaker.precision import exact_float32, hold_exact_matmuls

GPU = torch.device("cuda")  # its flags are there without one


@pytest.fixture(autouse=True)
def precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as VLLM_FLOAT32_MATMUL_PRECISION
    torch._dynamo.reset()
    yield
    torch.set_float32_matmul_precision(before)
    torch._dynamo.reset()


def num_compiled_beside_an_encode():
    """How often a decode loop was compiled, with a step in the middle of an encode."""
    counter = CompileCounter()
    decode = torch.compile(lambda x: torch.sin(x) + 1, backend=counter, dynamic=False)
    decode(torch.ones(4))
    entered, left = threading.Event(), threading.Event()

    def encode():
        with exact_float32(GPU):
            entered.set()
            left.wait(60)

    thread = threading.Thread(target=encode)
    thread.start()
    assert entered.wait(60)
    decode(torch.ones(4))
    left.set()
    thread.join(60)
    return counter.frame_count


@pytest.mark.long  # to compile anything takes longer than most tests
def test_where_products_are_held_exact_an_encode_compiles_nothing_anew():
    hold_exact_matmuls(torch.bfloat16)
    assert num_compiled_beside_an_encode() == 1
