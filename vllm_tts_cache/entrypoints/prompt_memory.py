"""The voices' parts of prompts that hold encodings, made once and kept in memory."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """What knows the memory that it takes."""

    @property
    def num_bytes(self) -> int:
        """Bytes, near enough."""
        ...


P = TypeVar("P", bound=Sized)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[P]):
    audio_sha256: str
    part: P


class PromptMemory(Generic[P]):
    """Parts by salt, least recently used first; for the event loop only.

    Args:
        max_bytes: Of all parts together; a larger one is not kept.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry[P]] = OrderedDict()
        self._num_forgets = 0
        self.num_bytes = 0

    async def get_or_build(
        self, salt: str, audio_sha256: str, build: Callable[[], Awaitable[P]]
    ) -> P:
        """Return the part of this salt, made by ``build`` if it is not here.

        Raises: whatever ``build`` raises; nothing is kept then.
        """
        if (entry := self._entries.get(salt)) is not None:
            self._entries.move_to_end(salt)
            return entry.part
        num_forgets = self._num_forgets
        part = await build()
        # Else what was forgotten meanwhile would be kept after all.
        if num_forgets == self._num_forgets:
            self._keep(salt, _Entry(audio_sha256, part))
        return part

    def forget(self, audio_sha256: str) -> None:
        """Drop everything of this audio; what is being built is not kept."""
        self._num_forgets += 1
        for salt, entry in list(self._entries.items()):
            if entry.audio_sha256 == audio_sha256:
                self._drop(salt)

    def _keep(self, salt: str, entry: _Entry[P]) -> None:
        if salt in self._entries or entry.part.num_bytes > self._max_bytes:
            return
        self._entries[salt] = entry
        self.num_bytes += entry.part.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, salt: str) -> None:
        self.num_bytes -= self._entries.pop(salt).part.num_bytes
