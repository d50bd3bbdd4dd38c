"""Which reference audios running requests still need."""

import asyncio
import time
from collections import Counter

# A request needs its encodings until its prefill: far less than this. A generator
# that the host dropped without starting it must not hold up a delete for ever.
PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.01


class RunningRequests:
    """Requests of this process between being accepted and their first output."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def enter(self, audio_sha256: str | None) -> None:
        """A request that needs this audio's encodings (None: no audio) was accepted."""
        if audio_sha256 is not None:
            self._counts[audio_sha256] += 1

    def leave(self, audio_sha256: str | None) -> None:
        """It has prefilled, or is over."""
        if audio_sha256 is None:
            return
        self._counts[audio_sha256] -= 1
        if self._counts[audio_sha256] <= 0:
            del self._counts[audio_sha256]

    async def drained(self, audio_sha256: str) -> None:
        """Return when no accepted request needs the audio, or when patience ends."""
        until = time.monotonic() + PATIENCE_SECONDS
        while audio_sha256 in self._counts and time.monotonic() < until:
            await asyncio.sleep(_POLL_SECONDS)
