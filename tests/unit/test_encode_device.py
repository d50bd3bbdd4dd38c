import threading

import pytest
import torch

from tests.encoding_samples import make_encoding
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.model_executor.encode_device import EncodeDevice, GpuMemory

GIB = 1024**3
CPU = torch.device("cpu")
ENCODING = make_encoding()


class Gpu:
    """Memory of a GPU: so much is free, and so much more after a tidying."""

    def __init__(self, free=8 * GIB, after=8 * GIB):
        self.free, self.after = free, after
        self.memory = GpuMemory(num_free_bytes=lambda: self.free, give_back=self.tidy)
        self.num_tidied = 0

    def tidy(self):
        self.num_tidied += 1
        self.free = self.after


class Encode:
    """Runs out of memory so many times, as torch or as an encoder says it."""

    def __init__(self, num_failures=0, *, wrapped=False):
        self.num_failures, self.wrapped = num_failures, wrapped
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            error = torch.OutOfMemoryError("CUDA out of memory")
            if self.wrapped:
                raise EncodeError("codec encoder: CUDA out of memory") from error
            raise error
        return ENCODING


def run(gpu, encode, num_bytes=GIB):
    return gpu.memory.run(encode, num_bytes)


@pytest.fixture(autouse=True)
def own_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_with_memory_to_spare_it_encodes_once_and_tidies_nothing():
    gpu, encode = Gpu(), Encode()
    assert run(gpu, encode) is ENCODING
    assert (encode.num_calls, gpu.num_tidied) == (1, 0)


def test_a_gpu_without_room_refuses_before_it_starts_and_names_the_setting():
    gpu, encode = Gpu(free=GIB + 1), Encode()
    with pytest.raises(
        EncodeError, match=r"1024 MiB .* 1024 MiB are free; .*gpu_memory_utilization"
    ):
        run(gpu, encode)
    assert encode.num_calls == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_running_out_of_memory_tidies_and_tries_once_more(wrapped):
    gpu, encode = Gpu(), Encode(1, wrapped=wrapped)
    assert run(gpu, encode) is ENCODING
    assert (encode.num_calls, gpu.num_tidied) == (2, 1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_running_out_of_memory_twice_names_the_setting(wrapped):
    gpu, encode = Gpu(), Encode(2, wrapped=wrapped)
    with pytest.raises(EncodeError, match="gpu_memory_utilization"):
        run(gpu, encode)
    assert encode.num_calls == 2


def test_another_error_is_not_tried_again():
    gpu, num_calls = Gpu(), []

    def encode():
        num_calls.append(1)
        raise EncodeError("the network failed")

    with pytest.raises(EncodeError, match="the network failed"):
        run(gpu, encode)
    assert len(num_calls) == 1
    assert gpu.num_tidied == 0


def test_memory_of_a_cpu_is_not_asked_and_no_gradients_are_recorded():
    seen = []

    def encode():
        seen.append((torch.is_inference_mode_enabled(), torch.get_num_threads()))
        return ENCODING

    # On a thread of its own, because it makes its thread nicer.
    thread = threading.Thread(target=EncodeDevice(CPU).run, args=(encode, 10**15))
    thread.start()
    thread.join(60)
    assert seen == [(True, 1)]
    assert not torch.is_inference_mode_enabled()
