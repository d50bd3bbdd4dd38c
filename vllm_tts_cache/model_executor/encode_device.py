"""Where the encode thread computes: its device, its stream, and memory to do it."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.model_executor.encode_priority import give_way
from vllm_tts_cache.store.encoding import Encoding

logger = logging.getLogger("vllm.vllm_tts_cache")

LONGEST_SECONDS = 30.0  # the longest reference audio that is accepted
_MIB = 1024**2
# Kernels' workspaces, and what decoding may want to grow by in the meantime.
_MARGIN_BYTES = 256 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """What a GPU has left for an encode. vLLM's memory profile knows none of it.

    Attributes:
        num_free_bytes: What this process may still allocate, its allocator's unused
            blocks included.
        give_back: Hands the allocator's unused blocks back to the device.
    """

    num_free_bytes: Callable[[], int]
    give_back: Callable[[], None]

    @classmethod
    def of(cls, device: torch.device) -> "GpuMemory":
        """Return the memory of a CUDA device."""

        def num_free_bytes() -> int:
            free, _ = torch.cuda.mem_get_info(device)
            reserved = torch.cuda.memory_reserved(device)
            return free + reserved - torch.cuda.memory_allocated(device)

        return cls(num_free_bytes=num_free_bytes, give_back=torch.cuda.empty_cache)

    def run(self, encode: Callable[[], Encoding], num_bytes: int) -> Encoding:
        """Encode if so much is free; once more, with a tidy allocator, if it was not.

        What is short here would otherwise be short in the decode loop, where an
        out-of-memory error ends the engine.

        Raises: EncodeError that names the setting to lower.
        """
        if (free := self.num_free_bytes()) < num_bytes + _MARGIN_BYTES:
            raise _too_little(num_bytes, free)
        try:
            return encode()
        except Exception as exc:
            if not _is_out_of_memory(exc):
                raise
        # Only here: the exception held the tensors of the attempt.
        self.give_back()
        try:
            return encode()
        except Exception as exc:
            if not _is_out_of_memory(exc):
                raise
            raise _too_little(num_bytes, self.num_free_bytes()) from exc


class EncodeDevice:
    """Runs encodes on one device, on a stream of their own where there are such.

    Args:
        device: Where the encoders are; with its index.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._memory = GpuMemory.of(device) if self._is_cuda else None
        self._stream: torch.cuda.Stream | None = None
        self._prepared = threading.local()  # a thread's id may come back in another

    def run(self, encode: Callable[[], Encoding], num_bytes: int) -> Encoding:
        """Encode on the calling thread; one thread at a time.

        Args:
            encode: Makes the encoding.
            num_bytes: What it takes of the device's memory, at most.

        Raises: EncodeError if the device has too little memory left.
        """
        if not hasattr(self._prepared, "by"):
            self._prepare_thread()
            self._prepared.by = self
        with torch.inference_mode(), self._on_stream():
            if self._memory is None:
                return encode()
            return self._memory.run(encode, num_bytes)

    def log_need(self, num_bytes_per_second: int) -> None:
        """Say once, at the start, what the longest encode takes and nobody reserved."""
        if self._is_cuda:
            logger.info(
                "Encoding %.0f s of reference audio takes up to %.0f MiB of GPU memory "
                "beside gpu_memory_utilization.",
                LONGEST_SECONDS,
                LONGEST_SECONDS * num_bytes_per_second / _MIB,
            )

    def _prepare_thread(self) -> None:
        # All of this belongs to a thread, and a new one has the defaults. One CPU
        # thread: resampling must not open a pool as wide as the machine beside the
        # decode loop.
        if self._device.type == "cpu":
            give_way()  # before it computes anything
        torch.set_num_threads(1)
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # priority 0 is the lowest

    def _on_stream(self) -> AbstractContextManager[object]:
        return (
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )


def _is_out_of_memory(exc: BaseException) -> bool:
    # Encoders put an error of their own around what torch raises.
    return any(isinstance(e, torch.OutOfMemoryError) for e in (exc, exc.__cause__))


def _too_little(num_bytes: int, num_free_bytes: int) -> EncodeError:
    return EncodeError(
        f"encoding this reference audio takes up to {num_bytes / _MIB:.0f} MiB of GPU "
        f"memory and {num_free_bytes / _MIB:.0f} MiB are free; a lower "
        "gpu_memory_utilization leaves it more"
    )
