"""Encodes reference audio on one background thread of a worker, beside decoding."""

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.model_executor.politeness import Politeness
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey

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

    Args:
        encode: Makes one encoding, on the thread.
        device: Where the encoders are.
        yield_seconds: How long a job gives way to decoding on a CPU, see
            ``Politeness``; another device has a stream of its own instead.
    """

    def __init__(
        self,
        encode: Callable[[EncodeJob], Encoding],
        device: torch.device,
        *,
        yield_seconds: float,
    ):
        self._encode = encode
        self._device = device
        self._yield_seconds = yield_seconds
        self._jobs: queue.SimpleQueue[tuple[EncodeJob, Future[Encoding]]] = (
            queue.SimpleQueue()
        )
        self._flights: dict[EncodingKey, Future[Encoding]] = {}
        self._failures: OrderedDict[EncodingKey, str] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: EncodeJob) -> "Future[Encoding]":
        """Queue the job, or join the flight of its key; returns at once.

        What was encoded arrives in the future even if no tier could keep it.
        """
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
        politeness = self._give_way()
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)  # priority 0 is the lowest
        with torch.inference_mode(), torch.cuda.stream(stream):
            while True:
                job, flight = self._jobs.get()
                with politeness.job() if politeness else nullcontext():
                    self._run_one(job, flight)

    def _run_one(self, job: EncodeJob, flight: "Future[Encoding]") -> None:
        try:
            encoding = self._encode(job)
        except Exception as exc:  # noqa: BLE001  the thread must outlive any one clip
            audio = job.key.audio_sha256
            logger.warning("Encoding %s of %s: %s", job.encoder_name, audio, exc)
            self._land(job.key, failure=str(exc) or repr(exc))
            flight.set_exception(exc)
        else:
            self._land(job.key, failure=None)
            flight.set_result(encoding)

    def _land(self, key: EncodingKey, failure: str | None) -> None:
        with self._lock:
            del self._flights[key]
            if failure is None:
                return
            self._failures[key] = failure
            while len(self._failures) > MAX_REMEMBERED_FAILURES:
                self._failures.popitem(last=False)

    def _give_way(self) -> Politeness | None:
        """Leave the decode loop the cores that it shares with this thread."""
        if self._device.type != "cpu":
            return None
        torch.set_num_threads(1)
        try:
            return Politeness(self._yield_seconds)
        except (AttributeError, OSError) as exc:  # not Linux, or not allowed here
            logger.info("The encode thread keeps its normal priority: %s", exc)
            return None
