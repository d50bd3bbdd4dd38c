"""The voices of a stopped server: opens its directory, reads and writes it."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_tts_cache import errors
from vllm_tts_cache.catalogue.pages import Page, Sort, cursor
from vllm_tts_cache.entrypoints.cli.common import OnConflict, pairs, settings_of
from vllm_tts_cache.entrypoints.http import models
from vllm_tts_cache.store.bundles import Bundles
from vllm_tts_cache.store.opening import open_existing
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import DEFAULT_TENANT, Tenant

_PAGE = 1000


class VoicesDirectory:
    """A tenant's voices in a store, by methods named as `VoicesClient`'s."""

    def __init__(self, store: SpeakerStore, bundle_key: str, tenant: str):
        self.store = store
        self._tenant = tenant
        self._bundles = Bundles(store, bundle_key)

    def voices(
        self,
        *,
        search: str | None = None,
        label: list[str] | None = None,
        sort: Sort = "name",
    ) -> Iterator[dict[str, Any]]:
        """Yield registered voices.

        Raises: ConfigError: The tenant has none, and others have.
        """
        usage = self.store.usage_of_tenants()
        held = sorted(name for name, its in usage.items() if its.num_voices)
        if held and self._tenant not in held:
            reason = f"{self._tenant} has no voices; of {', '.join(held)} there are"
            raise errors.ConfigError(f"--tenant: {reason}")
        page = Page(
            limit=_PAGE,
            search=search or "",
            labels=pairs(label),
            sort=sort,
            tenant=self._tenant,
        )
        while records := self.store.records(page):
            yield from map(models.voice, records)
            page = replace(page, after=cursor(records[-1], sort))

    def get(self, name: str) -> dict[str, Any]:
        """Return a voice, and by which encoders it is encoded.

        Raises: SpeakerNotFoundError.
        """
        if (found := self.store.find(name, self._tenant)) is None:
            raise errors.SpeakerNotFoundError(name)
        encoded_by = sorted(found.fingerprints)
        return {"voice": models.voice(found.record), "encoded_by": encoded_by}

    def find(self, name: str) -> dict[str, Any] | None:
        """Return a voice; None if there is none of this name or id."""
        if (found := self.store.find(name, self._tenant)) is None:
            return None
        is_lost = self.store.is_lost(found.record)
        return models.voice(found.record, is_lost=is_lost)

    def delete(self, name: str, key: str | None = None) -> None:
        """Delete a voice and all of its files that no other voice has.

        Raises: SpeakerNotFoundError, StorageError.
        """
        del key  # a call into a directory is not repeated, as its answer cannot be lost
        self.store.remove_files(self.store.registrations.delete(name, self._tenant))

    def bundle(self, name: str) -> bytes:
        """Return a voice's bundle. Raises: SpeakerNotFoundError, StorageError."""
        return self._bundles.export(name, self._tenant)[1]

    def add_bundle(
        self,
        bundle: bytes,
        name: str | None,
        on_conflict: OnConflict,
        key: str | None = None,
    ) -> dict[str, Any]:
        """Register the voice of a bundle, without the checks of a model.

        Raises: SpeakerRequestError, StorageError.
        """
        del key
        tenant = Tenant(name=self._tenant)
        imported = self._bundles.import_voice(
            bundle, name=name, on_conflict=on_conflict, tenant=tenant
        )
        if imported.done.deletion is not None:
            self.store.remove_files(imported.done.deletion)
        shown = {
            "voice": models.voice(imported.done.record),
            "encodings_kept": imported.num_kept,
            "encodings_left": imported.num_left,
        }
        return {"imported": [shown]}


@contextmanager
def open_directory(
    directory: Path | None, tenant: str | None = None, *, writes: bool
) -> Iterator[VoicesDirectory]:
    """Open a directory of voices; by default that of the environment's settings.

    Raises:
        ConfigError: No server has stored voices there; or, with ``writes``, one runs.
        StorageError: The directory cannot be read.
    """
    settings = settings_of(directory)
    with closing(open_existing(settings)) as store:
        if writes and (num_alive := store.participants.num_alive()):
            raise errors.ConfigError(
                f"{store.directory} is in use: {num_alive} API servers have it open. "
                "Use --url in place of --directory, or stop the server first."
            )
        yield VoicesDirectory(store, settings.bundle_key, tenant or DEFAULT_TENANT)
