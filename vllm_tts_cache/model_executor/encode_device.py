"""The encode thread's device, with its stream, memory and CPU priority."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

from vllm_tts_cache import patch_once
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker.precision import computed_on, lower_priority
from vllm_tts_cache.store.encoding import Encoding

logger = logging.getLogger("vllm.vllm_tts_cache")

_MIB = 1024**2
_ERROR_MODE_PLACE = 3  # among the arguments of torch.cuda.graph
# For kernels' workspaces, and for growth of the decode loop during an encode.
MARGIN_BYTES = 256 * _MIB


class EncodeDevice:
    """Runs encodes on one device (with its index), on a GPU on a stream of their own.

    One thread at a time may call it.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            capture_beside_encodes()
        self._stream: torch.cuda.Stream | None = None
        self._prepared = threading.local()  # thread ids are reused

    def run(self, encode: Callable[[], Encoding], num_bytes: int) -> Encoding:
        """Encode on the calling thread, and note the device in the encoding.

        Args:
            encode: Makes the encoding.
            num_bytes: Device memory that it takes at most.

        Raises: EncodeError if the device has too little memory left.
        """
        with self.entered(), torch.inference_mode():
            encoding = self._encode(encode, num_bytes) if self._is_cuda else encode()
        return encoding.computed_by(computed_on(self._device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the calling thread compute on this device and its stream inside.

        Encoders are loaded so too: their encodes then come after it on the stream.
        """
        if not hasattr(self._prepared, "by"):
            self._prepare_thread()
            self._prepared.by = self
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def _prepare_thread(self) -> None:
        # All of this is a thread's own, and a new thread has the defaults.
        if self._device.type == "cpu":
            lower_priority()  # before it computes anything
        _compute_on_one_cpu_thread()
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # priority 0 is the lowest

    def _encode(self, encode: Callable[[], Encoding], num_bytes: int) -> Encoding:
        """Encode if the memory is free; retry once with the allocator's cache empty.

        vLLM's memory profile does not know encodes. One that takes the last memory
        would make the decode loop run out of memory, which ends the engine.

        Raises: EncodeError that names the setting to lower.
        """
        self._make_room(num_bytes)
        try:
            return encode()
        except Exception as exc:
            if not _is_out_of_memory(exc):
                raise
        # Only here: the exception held the tensors of the attempt.
        _empty_cache()
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
        # Blocks that the allocator has cached. Those of CUDA graphs are among them and
        # stay, so the free memory is read again. With vLLM's sleep mode the weights
        # count on one side only.
        unused = torch.cuda.memory_reserved(self._device)
        unused -= torch.cuda.memory_allocated(self._device)
        if not 0 <= unused < wanted - free:
            _empty_cache()
            if (free := self._num_free_bytes()) >= wanted:
                return
        raise _too_little(num_bytes, free)

    def _num_free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]


def capture_beside_encodes() -> None:
    """Let other threads allocate while a CUDA graph is captured.

    Some models of the host capture while they serve (OmniVoice, Higgs Audio v3,
    VoxCPM2). By torch's default any thread's allocation then fails the capture.
    """

    def beside_encodes(init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def beside(self: Any, *args: Any, **kwargs: Any) -> None:
            if len(args) <= _ERROR_MODE_PLACE:
                kwargs.setdefault("capture_error_mode", "thread_local")
            init(self, *args, **kwargs)

        return beside

    patch_once(torch.cuda.graph, "__init__", beside_encodes)


def _compute_on_one_cpu_thread() -> None:
    """Keep resampling from starting a thread for each core beside decoding.

    A new thread gets the number that the last caller of torch set, so another thread
    sets the old one again.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    last_caller = threading.Thread(target=torch.set_num_threads, args=(before,))
    last_caller.start()
    last_caller.join()


def _empty_cache() -> None:
    try:
        torch.cuda.empty_cache()
    except RuntimeError as exc:  # with vLLM's sleep mode, torch cannot always
        logger.info("The unused GPU memory was not given back: %s", exc)


def _is_out_of_memory(exc: BaseException) -> bool:
    # Encoders raise an error of their own from torch's.
    return any(isinstance(e, torch.OutOfMemoryError) for e in (exc, exc.__cause__))


def _too_little(num_bytes: int, num_free_bytes: int) -> EncodeError:
    return EncodeError(
        f"encoding this reference audio takes up to {num_bytes / _MIB:.0f} MiB of GPU "
        f"memory and {num_free_bytes / _MIB:.0f} MiB are free; a lower "
        "gpu_memory_utilization leaves it more"
    )
