"""The catalogue as the host's other parts expect to find it: mappings of plain dicts.

Adapters of families that we do not serve look voices up by these, in the host's way.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.store.speaker_store import SpeakerStore


class HostView(Mapping[str, dict[str, Any]]):
    """``uploaded_speakers`` of the host, read through on every look-up."""

    def __init__(self, store: SpeakerStore):
        self._store = store

    def __getitem__(self, name: str) -> dict[str, Any]:
        if (found := self._store.find(name)) is None:
            raise KeyError(name)
        return _as_host_dict(found.record, self._store)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._store.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return self._store.catalogue.iter_names()

    def __len__(self) -> int:
        return self._store.catalogue.count()


class SpeakerNames(Set[str]):
    """All names a request may use; the host asks per request, so none is listed."""

    def __init__(self, builtin: frozenset[str], registered: Mapping[str, Any]):
        self._builtin = builtin
        self._registered = registered

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._registered

    def __iter__(self) -> Iterator[str]:
        yield from self._builtin
        yield from (name for name in self._registered if name not in self._builtin)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __or__(self, other: Set[Any]) -> set[Any]:
        return set(self) | set(other)


class NoMemo(dict[str, str]):
    """The host remembers waveforms by name here; another server may replace it."""

    def __setitem__(self, name: str, url: str) -> None:
        """Remember nothing."""


def load_audio(store: SpeakerStore, name: str) -> tuple[Any, int] | None:
    """Return a voice's samples, ``(num_samples,)`` float32, and their rate in Hz.

    None if it has no audio, or none that can be read: the host says that it is missing.
    """
    found = store.find(name)
    if found is None or found.record.audio_sha256 is None:
        return None
    audio = store.read_audio(found.record.audio_sha256)
    return None if audio is None else (audio.samples, audio.sample_rate_hz)


def load_embedding(store: SpeakerStore, name: str) -> list[float] | None:
    """Return the raw embedding that a voice was registered as; None if it has audio."""
    if (found := store.find(name)) is None:
        return None
    embedding = store.catalogue.speaker_embedding(found.record)
    return None if embedding is None else list(embedding)


def _as_host_dict(record: SpeakerRecord, store: SpeakerStore) -> dict[str, Any]:
    return {
        "name": record.name,
        "consent": record.consent,
        "created_at": record.generation,
        "ref_text": record.ref_text,
        "speaker_description": record.description,
        "mime_type": record.mime_type,
        "file_size": record.file_size,
        "sample_rate": record.sample_rate_hz,
        "embedding_source": "audio" if record.audio_sha256 else "direct",
        "embedding_dim": record.embedding_dim,
        # The host asks whether it is there, and reads it through `load_audio`.
        "file_path": str(store.directory),
    }
