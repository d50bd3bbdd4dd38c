"""Keep what was forgotten from coming back through a write already under way."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Audio:
    """One audio that somebody is writing or forgetting now."""

    __slots__ = ("lock", "num_forgotten", "num_users")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_forgotten = 0
        self.num_users = 0


class Intent:
    """Somebody's plan to write encodings of one audio, made before it read them."""

    def __init__(self, audio: _Audio):
        self._audio = audio
        # Waits for a forget that is under way, so that what is read from here on
        # is not something the forget has not come to yet.
        with audio.lock:
            self._num_forgotten = audio.num_forgotten

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Write inside the block, if True: nobody forgets the audio meanwhile."""
        with self._audio.lock:
            yield self._audio.num_forgotten == self._num_forgotten


class ForgetFence:
    """Orders the writes and the forgets of each audio within one process.

    Remembers an audio only while somebody writes or forgets it, so there is
    nothing to bound.
    """

    def __init__(self) -> None:
        self._audios: dict[str, _Audio] = {}
        self._lock = threading.Lock()

    @contextmanager
    def intent(self, audio_sha256: str) -> Iterator[Intent]:
        """Announce a write; a forget from now on revokes it."""
        with self._using(audio_sha256) as audio:
            yield Intent(audio)

    @contextmanager
    def forgetting(self, audio_sha256: str) -> Iterator[None]:
        """Revoke every announced write, and hold off new ones during the block."""
        with self._using(audio_sha256) as audio, audio.lock:
            audio.num_forgotten += 1
            yield

    @contextmanager
    def _using(self, audio_sha256: str) -> Iterator[_Audio]:
        with self._lock:
            audio = self._audios.setdefault(audio_sha256, _Audio())
            audio.num_users += 1
        try:
            yield audio
        finally:
            with self._lock:
                audio.num_users -= 1
                if not audio.num_users:
                    del self._audios[audio_sha256]
