import threading

import pytest
import torch

from vllm_tts_cache.speaker.precision import exact_float32

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def reduced_precision():
    """What an operator gets with VLLM_FLOAT32_MATMUL_PRECISION=high."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def tf32():
    return (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def test_tf32_is_off_inside_and_back_afterwards(reduced_precision):
    assert tf32() == (True, True)
    with exact_float32(CUDA):
        assert tf32() == (False, False)
        assert torch.get_float32_matmul_precision() == "highest"
    assert tf32() == (True, True)
    assert torch.get_float32_matmul_precision() == "high"


def test_tf32_is_back_after_an_error(reduced_precision):
    with pytest.raises(RuntimeError), exact_float32(CUDA):
        raise RuntimeError
    assert tf32() == (True, True)


def test_a_flag_that_is_off_already_stays_untouched():
    assert tf32() == (False, True)
    with exact_float32(CUDA):
        assert tf32() == (False, False)
    assert tf32() == (False, True)


def test_on_the_cpu_the_flags_of_the_gpu_stay_untouched():
    with exact_float32(CPU):
        assert tf32() == (False, True)


def test_a_reduced_matmul_precision_of_the_cpu_is_raised(reduced_precision):
    with exact_float32(CPU):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


def test_overlapping_blocks_keep_it_off_until_the_last_one_ends(reduced_precision):
    first_is_in, first_may_end = threading.Event(), threading.Event()

    def first():
        with exact_float32(CUDA):
            first_is_in.set()
            first_may_end.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_in.wait(10)
    with exact_float32(CUDA):
        first_may_end.set()
        thread.join()
        assert tf32() == (False, False)
    assert tf32() == (True, True)


def test_gradients_and_autocast_are_off_inside_only():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with exact_float32(CPU):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            assert product.dtype == torch.float32
            assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_inference_mode_enabled()
