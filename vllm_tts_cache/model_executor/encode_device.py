"""Where the encode thread computes: its device, stream, memory and CPU priority."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

from vllm_tts_cache import patch_once
from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker.precision import computed_on, lower_priority
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

logger = logging.getLogger("vllm.vllm_tts_cache")

_MIB = 1024**2
_ERROR_MODE_PLACE = 3  # among what torch.cuda.graph takes
# Kernels' workspaces, and what decoding may want to grow by in the meantime.
MARGIN_BYTES = 256 * _MIB


class EncodeDevice:
    """Runs encodes on one device, on a stream of their own where there are such.

    One thread at a time may call it.

    Args:
        device: Where the encoders are; with its index.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._memory = GpuMemory(device) if self._is_cuda else None
        if self._is_cuda:
            capture_beside_encodes()
        self._stream: torch.cuda.Stream | None = None
        self._prepared = threading.local()  # a thread's id may come back in another

    def run(self, encode: Callable[[], Encoding], num_bytes: int) -> Encoding:
        """Encode on the calling thread; the encoding says what computed it.

        Args:
            encode: Makes the encoding.
            num_bytes: What it takes of the device's memory, at most.

        Raises: EncodeError if the device has too little memory left.
        """
        with self.entered(), torch.inference_mode():
            if self._memory is None:
                encoding = encode()
            else:
                encoding = self._memory.run(encode, num_bytes)
        return encoding.computed_by(computed_on(self._device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the calling thread compute on this device, and on its stream, inside.

        Encoders are loaded so too: what encodes them then comes after it.
        """
        if not hasattr(self._prepared, "by"):
            self._prepare_thread()
            self._prepared.by = self
        with self._on_stream():
            yield

    def log_need(self, needs: Iterable[MemoryNeed]) -> None:
        """Say once, at the start, what the longest encode takes and nobody reserved.

        Args:
            needs: Of all encoders; one of them computes at a time.
        """
        if self._is_cuda:
            seconds = DEFAULT_LIMITS.max_seconds
            logger.info(
                "Encoding %g s of reference audio takes up to %.0f MiB of GPU memory "
                "beside gpu_memory_utilization.",
                seconds,
                max(need.of(seconds) for need in needs) / _MIB,
            )

    def _prepare_thread(self) -> None:
        # All of this belongs to a thread, and a new one has the defaults.
        if self._device.type == "cpu":
            lower_priority()  # before it computes anything
        _compute_on_one_cpu_thread()
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # priority 0 is the lowest

    def _on_stream(self) -> AbstractContextManager[object]:
        return (
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )


def capture_beside_encodes() -> None:
    """Have CUDA graphs captured so that other threads may allocate meanwhile; once.

    Some models of the host capture while they serve (OmniVoice, Higgs Audio v3,
    VoxCPM2). By torch's default any thread's allocation then spoils the capture.
    """

    def beside_encodes(init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def beside(self: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) <= _ERROR_MODE_PLACE:
                kwargs.setdefault("capture_error_mode", "thread_local")
            init(self, *args, **kwargs)

        return beside

    patch_once(torch.cuda.graph, "__init__", beside_encodes)


class GpuMemory:
    """What a GPU has left for an encode. vLLM's memory profile knows none of it."""

    def __init__(self, device: torch.device):
        self._device = device

    def run(self, encode: Callable[[], Encoding], num_bytes: int) -> Encoding:
        """Encode if so much is free; once more, with a tidy allocator, if it was not.

        What is short here would otherwise be short in the decode loop, where an
        out-of-memory error ends the engine.

        Raises: EncodeError that names the setting to lower.
        """
        self._make_room(num_bytes)
        try:
            return encode()
        except Exception as exc:
            if not _is_out_of_memory(exc):
                raise
        # Only here: the exception held the tensors of the attempt.
        _tidy()
        try:
            return encode()
        except Exception as exc:
            if not _is_out_of_memory(exc):
                raise
            raise _too_little(num_bytes, self._num_free_bytes()) from exc

    def _make_room(self, num_bytes: int) -> None:
        wanted = num_bytes + MARGIN_BYTES
        if (free := self._num_free_bytes()) >= wanted:
            return
        # Blocks that the allocator keeps for later. Those of CUDA graphs are among
        # them, and stay where they are, so what came free is looked at again. With
        # vLLM's sleep mode, the weights are counted on one side only.
        unused = torch.cuda.memory_reserved(self._device)
        unused -= torch.cuda.memory_allocated(self._device)
        if not 0 <= unused < wanted - free:
            _tidy()
            if (free := self._num_free_bytes()) >= wanted:
                return
        raise _too_little(num_bytes, free)

    def _num_free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]


def _compute_on_one_cpu_thread() -> None:
    """Keep resampling from opening a pool as wide as the machine beside decoding.

    torch gives the number of its last caller to every thread that is born later, so
    another caller puts it back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    last_caller = threading.Thread(target=torch.set_num_threads, args=(before,))
    last_caller.start()
    last_caller.join()


def _tidy() -> None:
    try:
        torch.cuda.empty_cache()
    except RuntimeError as exc:  # with vLLM's sleep mode, torch cannot always
        logger.info("The unused GPU memory was not given back: %s", exc)


def _is_out_of_memory(exc: BaseException) -> bool:
    # Encoders put an error of their own around what torch raises.
    return any(isinstance(e, torch.OutOfMemoryError) for e in (exc, exc.__cause__))


def _too_little(num_bytes: int, num_free_bytes: int) -> EncodeError:
    return EncodeError(
        f"encoding this reference audio takes up to {num_bytes / _MIB:.0f} MiB of GPU "
        f"memory and {num_free_bytes / _MIB:.0f} MiB are free; a lower "
        "gpu_memory_utilization leaves it more"
    )
