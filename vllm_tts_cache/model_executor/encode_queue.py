"""Encodes reference audio on one background thread of a worker, beside decoding."""

import logging
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from vllm_tts_cache.audio.segment import Segment
from vllm_tts_cache.encodings.key import EncodingKey

logger = logging.getLogger("vllm.vllm_tts_cache")

MAX_REMEMBERED_FAILURES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeJob:
    """One encoder on one audio."""

    key: EncodingKey
    encoder_name: str
    segment: Segment


class EncodeQueue:
    """Runs ``encode`` for each job, one after another, on a thread of its own.

    The thread starts with the first job. Jobs arrive by RPC or from a prefill, that
    is, when the engine serves: never while it captures graphs.
    """

    def __init__(self, encode: Callable[[EncodeJob], None], device: torch.device):
        self._encode = encode
        self._device = device
        self._jobs: queue.SimpleQueue[tuple[EncodeJob, Future[None]]] = (
            queue.SimpleQueue()
        )
        self._flights: dict[EncodingKey, Future[None]] = {}
        self._failures: OrderedDict[EncodingKey, str] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: EncodeJob) -> "Future[None]":
        """Queue the job, or join the flight of its key; returns at once."""
        with self._lock:
            if (flight := self._flights.get(job.key)) is not None:
                return flight
            flight = self._flights[job.key] = Future()
            self._failures.pop(job.key, None)
            self._jobs.put((job, flight))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tts-cache-encode", daemon=True
                )
                self._thread.start()
        return flight

    def in_flight(self, key: EncodingKey) -> bool:
        """Tell whether the key is queued or being encoded."""
        with self._lock:
            return key in self._flights

    def failure(self, key: EncodingKey) -> str | None:
        """Return the reason of the key's last failure, unless it was tried again."""
        with self._lock:
            return self._failures.get(key)

    @property
    def num_in_flight(self) -> int:
        """Number of keys that are queued or being encoded."""
        with self._lock:
            return len(self._flights)

    def _run(self) -> None:
        # All of this belongs to a thread; a new one has the defaults.
        _yield_to_decoding(self._device)
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)  # priority 0 is the lowest
        with torch.inference_mode(), torch.cuda.stream(stream):
            while True:
                self._run_one(*self._jobs.get())

    def _run_one(self, job: EncodeJob, flight: "Future[None]") -> None:
        try:
            self._encode(job)
        except Exception as exc:  # noqa: BLE001  the thread must outlive any one clip
            audio = job.key.audio_sha256
            logger.warning("Encoding %s of %s: %s", job.encoder_name, audio, exc)
            self._land(job.key, failure=str(exc) or repr(exc))
            flight.set_exception(exc)
        else:
            self._land(job.key, failure=None)
            flight.set_result(None)

    def _land(self, key: EncodingKey, failure: str | None) -> None:
        with self._lock:
            del self._flights[key]
            if failure is None:
                return
            self._failures[key] = failure
            while len(self._failures) > MAX_REMEMBERED_FAILURES:
                self._failures.popitem(last=False)


def _yield_to_decoding(device: torch.device) -> None:
    """Give the decode loop the cores that it shares with this thread.

    SCHED_IDLE rather than nice 19: it runs only on what decoding leaves over. The
    price is a cold request that takes longer beside running streams, see the
    scenario ``cold_bystander`` in docs/performance.md.
    """
    if device.type != "cpu":
        return
    torch.set_num_threads(1)
    thread = threading.get_native_id()
    try:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError) as exc:  # not Linux, or not allowed here
        logger.info("The encode thread keeps its normal priority: %s", exc)
