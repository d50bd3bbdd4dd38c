"""What the encode thread does for a job: read the audio, encode it, keep the result.

It computes on a device with a stream, memory and a CPU priority of its own, in the turn
that processes take for a key.
"""

import fcntl
import math
import os
import secrets
import struct
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import psutil
import torch

from vllm_tts_cache import patch_once
from vllm_tts_cache.audio.reference import ReferenceAudio, Segment
from vllm_tts_cache.catalogue import leases
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import (
    AudioGoneError,
    EncodeError,
    EncodersChangedError,
    StorageError,
)
from vllm_tts_cache.files import FILE_MODE, make_directory
from vllm_tts_cache.logs import logger
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.precision import computed_on, lower_priority
from vllm_tts_cache.speaker.reference import ReferenceEncoder
from vllm_tts_cache.speaker.wire import JobState, Want, WantReport
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import ADDRESS, Encoding, EncodingKey
from vllm_tts_cache.store.speaker_store import SpeakerStore

_SEGMENTS = frozenset(segment.value for segment in Segment)
# struct flock: l_type, l_whence, l_start, l_len, l_pid; a lock of the open file, not
# of the process, so that closing another descriptor of it does not release it.
_FLOCK = struct.Struct("hhqqi4x")
_KEY_BITS = 62
_FILE_NAME = "turns.lock"

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

Flow = tuple[str, Segment]  # a tenant, and the segment of its jobs


@dataclass(slots=True, kw_only=True, eq=False)
class EncodeJob:
    """One encode of one audio, for all clients that want it.

    Attributes:
        flows: Those that it waits in; it is encoded in the first turn of any.
        segment: Whose budget the encoding counts against: that of registered voices if
            it waits for one.
        is_urgent: Whether a request waits for it, and not only a precompute.
        is_forced: Whether it is encoded although the encoding is stored.
        is_in_memory: Whether the encoding exists, and only its file is missing.
        wanted_by: The client's id and the want's id of each want.
        queued_at: When it was wanted first, in monotonic seconds, as all times here.
        began_at: When the encode thread took it.
        not_before: When to try again, if another process has the turn of its key.
        aside_since: When another process was first seen to have that turn.
    """

    key: EncodingKey
    encoder_name: str
    flows: set[Flow]
    segment: Segment
    is_urgent: bool = False
    is_forced: bool = False
    is_in_memory: bool = False
    wanted_by: set[tuple[str, int]] = field(default_factory=set)
    queued_at: float = 0.0
    began_at: float = 0.0
    not_before: float = 0.0
    aside_since: float | None = None

    def join(self, other: "EncodeJob") -> None:
        """Add the wants of another job with the same key."""
        self.flows |= other.flows
        if other.segment is Segment.REGISTERED:
            self.segment = other.segment
        self.is_urgent |= other.is_urgent
        self.is_forced |= other.is_forced
        self.wanted_by |= other.wanted_by


class EncodeClock:
    """Counts encodes by encoder and segment since the start; any thread may ask.

    Attributes:
        num_encodes: Finished encodes, by encoder.
        num_failed: Failed ones, by encoder.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By encoder, segment and what took so long; counts by the duration's class too.
        self._seconds = defaultdict[tuple[str, Segment, str], float](float)
        self._counts = Counter[tuple[str, Segment, str, int]]()
        self.num_encodes, self.num_failed = Counter[str](), Counter[str]()

    def add(self, job: EncodeJob, encode_seconds: float, queue_seconds: float) -> None:
        """Count a successful encode, and how long its job waited before."""
        self.num_encodes[job.encoder_name] += 1
        with self._lock:
            for what, seconds in ("encode", encode_seconds), ("queue", queue_seconds):
                of = job.encoder_name, job.segment, what
                # A bound counts what is as long as it.
                number = bisect_left(wire.DURATION_BOUNDS_SECONDS, seconds)
                self._counts[(*of, number)] += 1
                self._seconds[of] += seconds

    def times(self) -> list[wire.EncodeTimes]:
        """Return what was counted so far."""
        classes = range(len(wire.DURATION_BOUNDS_SECONDS) + 1)
        with self._lock:
            made = {
                of: wire.Durations([self._counts[(*of, n)] for n in classes], seconds)
                for of, seconds in self._seconds.items()
            }
        return [
            wire.EncodeTimes(
                name, segment.value, durations, made[name, segment, "queue"]
            )
            for (name, segment, what), durations in made.items()
            if what == "encode"
        ]


class KeyTurns:
    """Turns by key among processes, each a locked byte of one file.

    They save work and are not needed for correctness: publishing an encoding twice is
    harmless. A turn ends with its process, however that ends.

    Args:
        path: The lock file; made if missing, and never grows.

    Attributes:
        look_again_seconds: How long to wait before `turn` is asked for again.
    """

    look_again_seconds = 0.1

    def __init__(self, path: Path):
        self._path = path
        self._handle = -1
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        _turns.add(self)

    @contextmanager
    def turn(self, key: EncodingKey) -> Generator[bool, None, None]:
        """Hold the key's turn in the block; yields False if another one has it.

        Never waits. Where the file cannot be locked, each caller has the turn.
        """
        # Both parts are hashes already.
        number = int(key.audio_sha256[:16], 16) ^ int(key.encoder_fingerprint[:16], 16)
        byte = number % (1 << _KEY_BITS)
        with self._lock:
            # Threads share the open file, and with it the lock.
            is_mine = byte not in self._taken and self._take(byte)
            if is_mine:
                self._taken.add(byte)
        try:
            yield is_mine
        finally:
            with self._lock:
                if is_mine and byte in self._taken:  # `close` has released it, too
                    self._taken.remove(byte)
                    with suppress(OSError, ValueError):  # it could not be opened
                        released = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)
                        fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, released)

    def close(self) -> None:
        """Release every turn."""
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1
            self._taken.clear()

    def _take(self, byte: int) -> bool:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            if self._handle < 0:
                make_directory(self._path.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._handle = os.open(self._path, flags, FILE_MODE)
            fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        except OSError:
            pass  # turns save work; nothing depends on them
        return True


_turns: "WeakSet[KeyTurns]" = WeakSet()


def _release_in_child() -> None:
    # The child shares the open file: with it it would hold a dead parent's turns.
    for turns in list(_turns):
        turns._lock = threading.Lock()
        turns.close()


os.register_at_fork(after_in_child=_release_in_child)


class LeasedTurns:
    """Turns as of `KeyTurns` among several machines: leases in their catalogue."""

    # Each attempt is two queries to a server that a whole fleet uses.
    look_again_seconds = 0.5

    def __init__(self, database: Database):
        self._database = database

    @contextmanager
    def turn(self, key: EncodingKey) -> Generator[bool, None, None]:
        """Hold the key's turn in the block; yields False if another one has it.

        While the catalogue fails, each caller has the turn.
        """
        holder = secrets.token_hex(8)  # this process may take the next turn
        is_mine = True
        with suppress(StorageError), self._database.read() as db:
            is_mine = leases.take_turn(db, key.digest, holder)
        try:
            yield is_mine
        finally:
            if is_mine:
                with suppress(StorageError), self._database.read() as db:
                    leases.give_turn_back(db, key.digest, holder)


Turns = KeyTurns | LeasedTurns


def open_turns(settings: Settings, database: Database) -> Turns:
    """Return the turns that all processes of a catalogue share."""
    if database.backend.has_leases:
        return LeasedTurns(database)
    return KeyTurns(settings.samples_dir / _FILE_NAME)


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

    Only the encode thread calls its methods; `job_of` is for the RPC's thread.

    Args:
        encoders: By name; empty if `load` brings them.
        cache: Gets the encodings.
        store: Has the reference audio.
        device: The encoders' device.
        turns: Keep two processes from encoding one key at a time.

    Attributes:
        times: How long encodes took and waited.
    """

    def __init__(
        self,
        *,
        encoders: Mapping[str, ReferenceEncoder],
        cache: EncodingCache,
        store: SpeakerStore,
        device: EncodeDevice,
        turns: Turns,
    ):
        self._encoders = dict(encoders)
        self._cache = cache
        self._store = store
        self._device = device
        self.turns = turns
        self.times = EncodeClock()

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

    def job_of(self, want: Want) -> EncodeJob | WantReport:
        """Return what is to be done for a want, or how it ends at once."""
        failed = partial(WantReport, want.id, JobState.FAILED)
        encoders = self._encoders.items()
        names = (n for n, e in encoders if e.fingerprint == want.fingerprint)
        if (name := next(names, None)) is None:
            return WantReport(want.id, JobState.NO_ENCODER)
        if ADDRESS.fullmatch(want.audio_sha256) is None:
            return failed("not a content address")
        if want.segment not in _SEGMENTS:
            return failed(f"no segment {want.segment!r}")
        key = EncodingKey(
            audio_sha256=want.audio_sha256, encoder_fingerprint=want.fingerprint
        )
        if not want.force and self._cache.is_stored(key):
            return WantReport(want.id, JobState.READY)
        segment = Segment(want.segment)
        return EncodeJob(
            key=key,
            encoder_name=name,
            flows={(want.tenant, segment)},
            segment=segment,
            is_urgent=want.urgent,
            is_forced=want.force,
            is_in_memory=not want.force and self._cache.memory.contains(key),
        )

    def do(self, job: EncodeJob, *, is_stuck: bool = False) -> bool:
        """Store the encoding on disk and in memory; where one fails, in the other.

        Args:
            job: Which encoding.
            is_stuck: Whether to do it although another process has the key's turn.

        Returns: False, at once, if another process has the key's turn.

        Raises:
            AudioGoneError: The audio is not stored (any more).
            EncodersChangedError: Other encoders were loaded.
            EncodeError: The encoder failed, or nothing has room for the encoding.
            StorageError: The audio could not be read.
        """
        key = job.key
        with self.turns.turn(key) as is_mine:
            if not (is_mine or is_stuck):
                return False
            if not job.is_forced and self._is_done(job):
                return True
            began_at, since = time.monotonic(), self._cache.memory.num_deletes
            if (audio := self._store.read_audio(key.audio_sha256)) is None:
                raise AudioGoneError
            encoder = self._encoders.get(job.encoder_name)
            if encoder is None or encoder.fingerprint != key.encoder_fingerprint:
                raise EncodersChangedError
            encoding = self._device.run(encoder, audio)
            self.times.add(job, time.monotonic() - began_at, began_at - job.queued_at)
            if not self._cache.put(key, encoding, job.segment, since=since):
                if not self._store.has_audio(key.audio_sha256):
                    raise AudioGoneError
                raise EncodeError("its encoding fits neither in memory nor on the disk")
        return True

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

    def _is_done(self, job: EncodeJob) -> bool:
        """Tell whether the encoding exists; one that was only in memory is stored."""
        if self._cache.is_stored(job.key):
            return True
        if job.is_in_memory:
            key, segment, since = job.key, job.segment, self._cache.memory.num_deletes
            found = self._cache.get(key, segment)
            return bool(found and self._cache.put(key, found, segment, since=since))
        # Another machine may have made it.
        has_copies = self._store.copies is not None
        return has_copies and self._cache.load(job.key, job.segment)
