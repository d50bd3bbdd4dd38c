"""The voices' parts of prompts that hold encodings, made once and kept in memory."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """What knows the memory that it takes."""

    @property
    def num_bytes(self) -> int:
        """Bytes, near enough."""
        ...


P = TypeVar("P", bound=Sized)

# Of the entry, its key and the part's objects; a short voice is little else.
_ENTRY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Entry(Generic[P]):
    audio_sha256: str
    part: P

    @property
    def num_bytes(self) -> int:
        return _ENTRY_BYTES + self.part.num_bytes


class PromptMemory(Generic[P]):
    """Parts by voice and transcript, least recently used first.

    For the event loop only.

    Args:
        max_bytes: Of all parts together; a larger one is not kept.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, _Entry[P]] = OrderedDict()
        self._num_forgets = 0
        self.num_bytes = 0

    async def get_or_build(
        self, key: Hashable, audio_sha256: str, build: Callable[[], Awaitable[P]]
    ) -> P:
        """Return the part of this key, made by ``build`` if it is not here.

        Raises: whatever ``build`` raises; nothing is kept then.
        """
        if (entry := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            return entry.part
        num_forgets = self._num_forgets
        part = await build()
        # Else what was forgotten meanwhile would be kept after all.
        if num_forgets == self._num_forgets:
            self._keep(key, _Entry(audio_sha256, part))
        return part

    def forget(self, audio_sha256: str) -> None:
        """Drop everything of this audio; what is being built is not kept."""
        self._num_forgets += 1
        for key, entry in list(self._entries.items()):
            if entry.audio_sha256 == audio_sha256:
                self._drop(key)

    def forget_all(self) -> None:
        """Drop everything; what is being built is not kept."""
        self._num_forgets += 1
        self._entries.clear()
        self.num_bytes = 0

    def _keep(self, key: Hashable, entry: _Entry[P]) -> None:
        if key in self._entries or entry.num_bytes > self._max_bytes:
            return
        self._entries[key] = entry
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Hashable) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
