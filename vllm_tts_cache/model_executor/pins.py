"""Keeps the encodings of pinned voices in a worker's memory."""

import logging
import threading
from collections.abc import Callable, Mapping

from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

# How soon a worker knows that a voice was pinned, or encoded: one indexed read each.
ROUND_SECONDS = 5.0
CLOSE_SECONDS = 10.0


class Pins:
    """Asks now and then which voices are pinned, on a thread of its own.

    By asking, and not by being told: a worker that starts, or was away, then knows no
    less than one that was there.

    Args:
        cache: What keeps them.
        pinned: Tells the addresses of pinned voices.
        fingerprints: Tells those of the encoders, by name.
        round_seconds: How long it waits in between.
    """

    def __init__(
        self,
        cache: EncodingCache,
        pinned: Callable[[], frozenset[str]],
        fingerprints: Callable[[], Mapping[str, str]],
        *,
        round_seconds: float = ROUND_SECONDS,
    ):
        self._cache = cache
        self._pinned = pinned
        self._fingerprints = fingerprints
        self._round_seconds = round_seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="tts-cache-pins", daemon=True
        )

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def refresh(self) -> None:
        """Ask once, and load what is stored and not in memory yet.

        Raises: StorageError.
        """
        audio_sha256s = self._pinned()
        self._cache.pin(audio_sha256s)
        for sha in sorted(audio_sha256s):
            for fingerprint in self._fingerprints().values():
                if self._closing.is_set():
                    return
                key = EncodingKey(audio_sha256=sha, encoder_fingerprint=fingerprint)
                self._cache.load(key)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.refresh()
            except StorageError as exc:
                throttled.warn_of("pinned voices", "Pinned voices: %s", exc)
            self._closing.wait(self._round_seconds)
