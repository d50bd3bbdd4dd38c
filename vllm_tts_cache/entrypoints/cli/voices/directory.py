"""A stopped server's directory, asked as its server would be."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from vllm_tts_cache.catalogue.pages import Page, Sort, cursor
from vllm_tts_cache.config import Settings, expanded, load_settings
from vllm_tts_cache.entrypoints.cli.style import pairs
from vllm_tts_cache.entrypoints.http import models
from vllm_tts_cache.errors import ConfigError, SpeakerNotFoundError
from vllm_tts_cache.store.bundles import Bundles, OnConflict
from vllm_tts_cache.store.opening import open_existing
from vllm_tts_cache.store.speaker_store import SpeakerStore, StoredSpeaker
from vllm_tts_cache.tenants import Tenant

_PAGE = 1000


class VoicesDirectory:
    """A tenant's voices of a store."""

    def __init__(self, store: SpeakerStore, bundle_key: str, tenant: str):
        self.store = store
        self._tenant = tenant
        self._bundles = Bundles(store, bundle_key)

    def voices(
        self,
        limit: int | None = None,
        *,
        search: str | None = None,
        label: list[str] | None = None,
        sort: Sort = "name",
    ) -> Iterator[dict[str, Any]]:
        """Yield registered voices."""
        page = Page(
            limit=_PAGE,
            search=search or "",
            labels=pairs(label),
            sort=sort,
            tenant=self._tenant,
        )
        left = limit
        while left is None or left > 0:
            page = replace(page, limit=_PAGE if left is None else min(left, _PAGE))
            records = self.store.records(page)
            yield from map(models.voice, records)
            if not records:
                return
            left = None if left is None else left - len(records)
            page = replace(page, after=cursor(records[-1], sort))

    def get(self, name: str) -> dict[str, Any]:
        """Return a voice, and by which encoders it is encoded.

        Raises: SpeakerNotFoundError.
        """
        found = self._found(name)
        return {
            "voice": models.voice(found.record),
            "encoded_by": sorted(found.fingerprints),
        }

    def find(self, name: str) -> dict[str, Any] | None:
        """Return a voice; None if there is none of this name or id."""
        if (found := self.store.find(name, self._tenant)) is None:
            return None
        is_lost = self.store.is_lost(found.record)
        return models.voice(found.record, is_lost=is_lost)

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a voice and all of its files that no other voice has.

        Raises: SpeakerNotFoundError, StorageError.
        """
        found = self._found(name)
        self.store.remove_files(self.store.registrations.delete(name, self._tenant))
        return {"id": found.record.speaker_id, "deleted": True}

    def save_bundle(self, name: str, file: IO[bytes]) -> int:
        """Write a voice's bundle; returns its bytes.

        Raises: SpeakerNotFoundError, StorageError, OSError.
        """
        _, data = self._bundles.export(name, self._tenant)
        return file.write(data)

    def consents(self) -> Iterator[dict[str, Any]]:
        """Yield consent recordings."""
        after = ""
        while page := self.store.consents.on_page(_PAGE, after, self._tenant):
            yield from map(models.consent, page)
            after = page[-1].consent_id

    def add_bundle(
        self, bundle: bytes, name: str | None, on_conflict: OnConflict
    ) -> dict[str, Any]:
        """Register what a bundle holds, as far as can be told without a model.

        Raises: SpeakerRequestError, StorageError.
        """
        imported = self._bundles.import_voice(
            bundle,
            name=name,
            on_conflict=on_conflict,
            tenant=Tenant(name=self._tenant),
        )
        if imported.done.deletion is not None:
            self.store.remove_files(imported.done.deletion)
        shown = {
            "voice": models.voice(imported.done.record),
            "encodings_kept": imported.num_kept,
            "encodings_left": imported.num_left,
        }
        return {"imported": [shown]}

    def _found(self, name: str) -> StoredSpeaker:
        if (found := self.store.find(name, self._tenant)) is None:
            raise SpeakerNotFoundError(name)
        return found


@contextmanager
def open_directory(
    directory: Path, tenant: str, *, writes: bool
) -> Iterator[VoicesDirectory]:
    """Open it as it is.

    Raises:
        ConfigError: No server has stored voices there, or one is running there and
            ``writes``.
        StorageError: It cannot be read.
    """
    settings = settings_of(directory)
    store = open_existing(settings)
    try:
        if writes:
            check_stopped(store)
        yield VoicesDirectory(store, settings.bundle_key, tenant)
    finally:
        store.close()


def settings_of(directory: Path | None) -> Settings:
    """The environment's settings, of another directory if one is given.

    Raises: ConfigError.
    """
    if directory is None:
        return load_settings()
    # Of whom no home is known the environment need not name another one.
    where = str(expanded(directory).absolute())
    return load_settings({**os.environ, "SPEAKER_SAMPLES_DIR": where})


def check_stopped(store: SpeakerStore) -> None:
    """Refuse to write where a server is at work.

    Raises: ConfigError.
    """
    if num_alive := store.participants.num_alive():
        raise ConfigError(
            f"{store.directory} is in use: {num_alive} API servers have it open. Ask "
            "the server (--url), or stop it first."
        )
