"""The voices' parts of prompts that hold encodings, made once and kept in memory."""

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from vllm_tts_cache.store.shelf import Shelf, Sized
from vllm_tts_cache.store.stats import Budget

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
        self._shelf: Shelf[Hashable, _Entry[P]] = Shelf(Budget(max_bytes))
        self._num_deletes = 0

    @property
    def num_bytes(self) -> int:
        """How many bytes all parts that are kept take."""
        return self._shelf.num_bytes

    async def get_or_build(
        self, key: Hashable, audio_sha256: str, build: Callable[[], Awaitable[P]]
    ) -> P:
        """Return the part of this key, made by ``build`` if it is not here.

        Raises: whatever ``build`` raises; nothing is kept then.
        """
        if (entry := self._shelf.entries.get(key)) is not None:
            self._shelf.entries.move_to_end(key)
            return entry.part
        num_deletes = self._num_deletes
        part = await build()
        # Else what was deleted meanwhile would be kept after all.
        if num_deletes == self._num_deletes:
            self._keep(key, _Entry(audio_sha256, part))
        return part

    def delete(self, audio_sha256: str) -> None:
        """Delete everything of this audio; what is being built is not kept."""
        self._num_deletes += 1
        for key, entry in list(self._shelf.entries.items()):
            if entry.audio_sha256 == audio_sha256:
                self._shelf.remove(key)

    def delete_all(self) -> None:
        """Delete everything; what is being built is not kept."""
        self._num_deletes += 1
        self._shelf.clear()

    def _keep(self, key: Hashable, entry: _Entry[P]) -> None:
        if key not in self._shelf.entries and self._shelf.fits(entry):
            self._shelf.add(key, entry)
