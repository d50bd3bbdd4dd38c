"""The registry as the host's other parts expect to find it: mappings of plain dicts."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.storage import Storage


class HostView(Mapping[str, dict[str, Any]]):
    """``uploaded_speakers`` of the host, read through on every look-up.

    Adapters of families that we do not own yet read a speaker's audio from its
    ``file_path``, a safetensors file of the host's own layout.
    """

    def __init__(self, storage: Storage):
        self._storage = storage

    def __getitem__(self, name: str) -> dict[str, Any]:
        if (record := self._storage.registry.get(name)) is None:
            raise KeyError(name)
        return _as_host_dict(record, self._storage)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._storage.registry.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return self._storage.registry.iter_names()

    def __len__(self) -> int:
        return self._storage.registry.count()


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


def _as_host_dict(record: SpeakerRecord, storage: Storage) -> dict[str, Any]:
    path = storage.audio.path(record.audio_sha256) if record.audio_sha256 else None
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
        "file_path": str(path) if path else "",
    }
