"""What the encode thread does for a job: read the audio, encode it, keep the result.

It computes on a device with a stream, memory and a CPU priority of its own.
"""

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from typing import Any

import numpy as np
import psutil
import torch

from vllm_tts_cache import patch_once
from vllm_tts_cache.audio.reference import ReferenceAudio, Segment
from vllm_tts_cache.errors import (
    AudioGoneError,
    EncodeError,
    EncodersChangedError,
    StorageError,
)
from vllm_tts_cache.logs import logger
from vllm_tts_cache.model_executor.encode_line import EncodeJob
from vllm_tts_cache.speaker.precision import computed_on, lower_priority
from vllm_tts_cache.speaker.reference import ReferenceEncoder
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.speaker_store import SpeakerStore

_MIB = 1024**2
_ERROR_MODE_PLACE = 3  # among the arguments of torch.cuda.graph
# For kernels' workspaces, and for growth of the decode loop during an encode.
MARGIN_BYTES = 256 * _MIB
_IDLE_LOOK_SECONDS = 0.25  # the kernel counts in hundredths of a second
# Noise for the first encode; long enough for every kernel that a longer clip runs.
_WARM_UP_SECONDS = 5.0
_WARM_UP_RATE_HZ = 48_000

# On two cores three streams leave 0.3 to 0.6 of a core idle, and an encode beside none
# leaves 0.8: see docs/performance.md.
IDLE_CORES = 0.7
REST_PER_ENCODE = 2.0
MAX_REST_SECONDS = 10.0


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
        self._idle_looked_at, self._idle_seconds, self._num_idle = 0.0, 0.0, 0.0
        self._prepared = threading.local()  # thread ids are reused

    def run(self, encoder: ReferenceEncoder, audio: ReferenceAudio) -> Encoding:
        """Encode on the calling thread, and note the device in the encoding.

        Raises: EncodeError: The encoder failed, or the device has too little memory.
        """
        with self.entered(), torch.inference_mode():
            if self._is_cuda:
                encoding = self._encode_in_free_memory(encoder, audio)
            else:
                encoding = encoder.encode(audio)
        encoding.origin = computed_on(self._device)  # before another thread has it
        return encoding

    def num_idle_cores(self) -> float:
        """Return how many of this process's cores were idle lately, on average.

        ``inf`` on a GPU, where an encode takes no core from a stream.
        """
        if self._device.type != "cpu":
            return math.inf
        now = time.monotonic()
        if (seconds := now - self._idle_looked_at) >= _IDLE_LOOK_SECONDS:
            cores = psutil.cpu_times(percpu=True)
            mine = os.sched_getaffinity(0)
            idle_seconds = sum(cores[number].idle for number in mine)
            self._num_idle = (idle_seconds - self._idle_seconds) / seconds
            self._idle_looked_at, self._idle_seconds = now, idle_seconds
        return self._num_idle

    def entered(self) -> AbstractContextManager[object]:
        """Have the calling thread compute on this device and its stream in the block.

        Encoders are loaded in it too, so that the stream runs their encodes later.
        """
        if not hasattr(self._prepared, "by"):
            self._prepare_thread()
            self._prepared.by = self
        on_stream = self._stream is not None
        return torch.cuda.stream(self._stream) if on_stream else nullcontext()

    def _prepare_thread(self) -> None:
        # These settings are per thread, and a new thread starts with the defaults.
        if self._device.type == "cpu":
            lower_priority()  # before it computes anything
        _compute_on_one_cpu_thread()
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # priority 0 is the lowest

    def _encode_in_free_memory(
        self, encoder: ReferenceEncoder, audio: ReferenceAudio
    ) -> Encoding:
        """Encode if the memory is free; retry once with the allocator's cache empty.

        vLLM's memory profile does not know encodes. One that takes the last memory
        would make the decode loop run out of memory, which ends the engine.

        Raises: EncodeError that names the setting to lower.
        """
        num_bytes = encoder.need.of(audio.seconds)
        self._make_room(num_bytes)
        try:
            return encoder.encode(audio)
        except Exception as exc:
            if not _is_out_of_memory(exc):
                raise
        # Not in the `except` block, where `exc` still holds the attempt's tensors.
        _empty_cache()
        try:
            return encoder.encode(audio)
        except Exception as exc:
            if not _is_out_of_memory(exc):
                raise
            raise _too_little(num_bytes, self._num_free_bytes()) from exc

    def _make_room(self, num_bytes: int) -> None:
        wanted = num_bytes + MARGIN_BYTES
        if (free := self._num_free_bytes()) >= wanted:
            return
        # `unused` is what the allocator has cached. Blocks of CUDA graphs are in it and
        # stay, so the free memory is read again. With vLLM's sleep mode only one of the
        # two numbers counts the weights.
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

    A new thread gets the number that `set_num_threads` was last called with, so another
    thread calls it with the old one.
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


class StoredEncodeWork:
    """Encodes what lies in the store, and keeps the encodings there and in memory.

    Only the encode thread calls its methods.

    Args:
        encoders: By name; empty if `load` brings them.
        cache: Gets the encodings.
        store: Has the reference audio.
        device: The encoders' device.
    """

    def __init__(
        self,
        *,
        encoders: Mapping[str, ReferenceEncoder],
        cache: EncodingCache,
        store: SpeakerStore,
        device: EncodeDevice,
    ):
        self._encoders = dict(encoders)
        self._cache = cache
        self._store = store
        self._device = device
        self.num_encodes: Counter[str] = Counter()

    def load(
        self, load: Callable[[], Mapping[str, ReferenceEncoder]]
    ) -> dict[str, str]:
        """Load encoders in the place of others; returns their fingerprints.

        Called on the encode thread: vLLM's sleep mode takes away what the thread that
        loads the model has allocated, even while an encode runs.

        Raises: CheckpointError, whatever ``load`` raises.
        """
        with self._device.entered():
            self._encoders = dict(load())
        return {name: e.fingerprint for name, e in self._encoders.items()}

    def warm_up(self) -> None:
        """Encode noise once with every encoder, on the encode thread; store nothing.

        Libraries make their handles for a thread, and load kernels, at the first use:
        hundreds of megabytes and a second or two, beside running streams otherwise.

        Raises: EncodeError.
        """
        num_samples = round(_WARM_UP_SECONDS * _WARM_UP_RATE_HZ)
        noise = np.random.default_rng(0).uniform(-0.1, 0.1, num_samples)
        audio = ReferenceAudio.of(noise.astype(np.float32), _WARM_UP_RATE_HZ)
        for encoder in self._encoders.values():
            self._device.run(encoder, audio)

    def is_done(self, job: EncodeJob) -> bool:
        """Tell whether the encoding exists; one that was only in memory is stored."""
        if job.is_forced:
            return False
        if self._cache.is_stored(job.key):
            return True
        if job.is_in_memory:
            key, segment, since = job.key, job.segment, self._cache.memory.num_deletes
            found = self._cache.get(key, segment)
            return bool(found and self._cache.put(key, found, segment, since=since))
        # Another machine may have made it.
        has_copies = self._store.copies is not None
        return has_copies and self._cache.load(job.key, job.segment)

    def encode(self, job: EncodeJob) -> Encoding:
        """Make the encoding. Raises: AudioGoneError, EncodeError, StorageError."""
        job.since = self._cache.memory.num_deletes
        audio = self._store.read_audio(job.key.audio_sha256)
        if audio is None:
            raise AudioGoneError
        encoder = self._encoders.get(job.encoder_name)
        if encoder is None or encoder.fingerprint != job.key.encoder_fingerprint:
            raise EncodersChangedError
        encoding = self._device.run(encoder, audio)
        self.num_encodes[job.encoder_name] += 1
        return encoding

    def keep(self, job: EncodeJob, encoding: Encoding) -> None:
        """Store the encoding, on disk and in memory; where one fails, in the other.

        Raises:
            AudioGoneError: Its audio was deleted meanwhile.
            EncodeError: Neither has room for it.
        """
        if self._cache.put(job.key, encoding, job.segment, since=job.since):
            return
        if not self._store.has_audio(job.key.audio_sha256):
            raise AudioGoneError
        raise EncodeError("its encoding fits neither in memory nor on the disk")

    def note_failed(self, job: EncodeJob, reason: str) -> None:
        """Store why a registered voice's encode failed, until one succeeds."""
        if job.segment is Segment.REGISTERED:
            with suppress(StorageError):  # then the next precompute tries it again
                self._store.note_failed(job.key, reason)

    def rest_seconds(self, encode_seconds: float) -> float:
        """Return how long to rest after an encode that no request waits for.

        Where the CPU encodes and no core is idle, an encode slows every running stream
        down. Rests leave most of their chunks alone.
        """
        if self._device.num_idle_cores() >= IDLE_CORES:
            return 0.0
        return min(REST_PER_ENCODE * encode_seconds, MAX_REST_SECONDS)
