"""One caller does the work, the others wait for it: among threads, among processes."""

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from filelock import FileLock, Timeout

from vllm_tts_cache.store.keys import EncodingKey

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LocalFlights(Generic[K, V]):
    """Threads that ask for one key at the same time share one execution."""

    def __init__(self) -> None:
        self._flights: dict[K, Future[V]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Keys that are being worked on now."""
        return len(self._flights)

    def run(self, key: K, work: Callable[[], V]) -> V:
        """Return what ``work`` returned to the first caller.

        Its exception goes to all who waited; the next call tries again. ``work``
        must not ask for its own key.
        """
        with self._lock:
            flight = self._flights.get(key)
            if is_leader := flight is None:
                flight = self._flights[key] = Future()
        if is_leader:
            self._fly(key, flight, work)
        return flight.result()

    def _fly(self, key: K, flight: "Future[V]", work: Callable[[], V]) -> None:
        try:
            value = work()
        except BaseException as exc:
            self._land(key)
            flight.set_exception(exc)
            raise
        self._land(key)
        flight.set_result(value)

    def _land(self, key: K) -> None:
        with self._lock:
            del self._flights[key]


class FileFlights:
    """Processes take turns by key, through locks that die with their process.

    Turns save work and are not needed for correctness, because publishing a
    content-addressed file twice is harmless. So whatever goes wrong here costs
    time only: the caller goes on without a turn.
    """

    # Two keys that share a stripe wait for each other now and then; one lock file
    # per key would leave a file behind for every voice that ever was.
    NUM_STRIPES = 256

    def __init__(self, directory: Path, *, poll_seconds: float = 0.02):
        self._directory = directory
        self._poll_seconds = poll_seconds
        self._has_warned = False

    @contextmanager
    def turn(self, key: EncodingKey, timeout_seconds: float) -> Iterator[bool]:
        """Hold the key's turn; False if it did not come, which stops nobody."""
        lock = self._acquired(key, timeout_seconds)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                with suppress(OSError):  # the kernel releases it with its descriptor
                    lock.release()

    def _acquired(self, key: EncodingKey, timeout_seconds: float) -> FileLock | None:
        stripe = int(key.digest[:8], 16) % self.NUM_STRIPES
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._directory / f"{stripe:02x}.lock")
            lock.acquire(timeout_seconds, self._poll_seconds)
        except Timeout:
            logger.info("No turn for %s in %.0f s", key.digest, timeout_seconds)
            return None
        # RuntimeError: this thread holds the stripe already, for another key.
        except (OSError, NotImplementedError, RuntimeError) as exc:
            self._warn_once(exc)
            return None
        return lock

    def _warn_once(self, exc: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Cannot lock in %s: %s. Processes may encode the same clip twice.",
                self._directory,
                exc,
            )
