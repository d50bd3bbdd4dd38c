"""Compares voice files with registered voices, and opens stopped servers' directories.

`VoicesDirectory` reads and writes a directory by methods named as `VoicesClient`'s.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_tts_cache import errors
from vllm_tts_cache.catalogue.pages import Page, Sort, cursor
from vllm_tts_cache.catalogue.records import EXTRAS
from vllm_tts_cache.config import Settings, expanded, load_settings
from vllm_tts_cache.entrypoints.cli.common import pairs
from vllm_tts_cache.entrypoints.cli.voices import bulk
from vllm_tts_cache.entrypoints.http import models
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.bundle_format import BundledVoice
from vllm_tts_cache.store.bundles import Bundles, OnConflict
from vllm_tts_cache.store.opening import open_existing
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import DEFAULT_TENANT, Tenant

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient

_PAGE = 1000
SUFFIX = ".voice"
_EXPIRED, _THERE = "expired", "there"


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the named files, and the voice files in the named folders.

    Raises:
        ConfigError: A folder holds no voice file.
        StorageError: A folder cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        with storage_errors(path):
            found = sorted(path.glob(f"*{SUFFIX}"))
        if not found:
            raise errors.ConfigError(f"{path} holds no file that ends in {SUFFIX}")
        files += found
    return files


def holds(path: Path, there: Mapping[str, Any] | None) -> bool:
    """Whether a file holds a registered voice as it is now. Raises: StorageError."""
    bundled = _bundled(_read(path))
    if bundled is None or there is None or bundled.id != there.get("id"):
        return False
    return not differences(bundled, bundled.name, there)


class Importing:
    """Registers the voices of bundles that are missing, and verifies all of them."""

    def __init__(
        self,
        target: "VoicesClient | VoicesDirectory",
        name: str | None,
        on_conflict: OnConflict,
    ):
        self._target = target
        self._name = name
        self._on_conflict: OnConflict = on_conflict
        # File -> the voice in it, and the registered voice that the library answered.
        self._arrived: dict[Path, tuple[BundledVoice, Mapping[str, Any]]] = {}

    def add(self, path: Path, stop: bulk.Stop) -> bulk.Outcome:
        """Import a file, unless its voice is registered or has expired.

        Raises: RemoteError, SpeakerExistsError, StorageError, StoppedError.
        """
        data = _read(path)
        bundled, on_conflict = _bundled(data), self._on_conflict
        there = None if bundled is None else self._find_equal(bundled, stop)
        end = None if bundled is None else bundled.expires_at
        if there is not None and there.get("audio_lost"):
            on_conflict = "replace"  # the registered voice is the same, without audio
        elif bundled is not None and there is not None:
            self._arrived[path] = bundled, there
            details = {"id": there.get("id")}
            return bulk.Outcome(name=str(path), outcome="unchanged", details=details)
        elif end is not None and end <= time.time():
            return bulk.Outcome(name=str(path), outcome=_EXPIRED)
        asked = data, self._name, on_conflict
        answer = bulk.written_once(self._target.add_bundle, *asked, stop=stop)
        if bundled is not None:
            self._arrived[path] = bundled, answer["imported"][0]["voice"]
        return bulk.Outcome(name=str(path), outcome="imported", details=answer)

    def verified(
        self, many: bulk.Many, num_jobs: int
    ) -> tuple[bulk.Many, dict[str, int]]:
        """Ask the library for each voice once more, and compare it with its file.

        Returns:
            The outcomes, in which a voice that is not registered as in its file has
            failed; and how many voices of files have not expired, how many of these
            are registered, and how many of those have the ids of their files.
        """
        paths = list(self._arrived)
        looked = bulk.in_parallel(
            paths, self._verify, title="verifying", num_jobs=num_jobs
        )
        failed = {each.name: each for each in looked.outcomes if each.error is not None}
        outcomes = [failed.get(each.name, each) for each in many.outcomes]
        there = [each for each in looked.outcomes if each.outcome == _THERE]
        counts = {
            "voices": sum(each.outcome != _EXPIRED for each in outcomes),
            "there": len(there),
            "with_their_ids": sum(each.details["has_its_id"] for each in there),
        }
        return bulk.Many(outcomes=outcomes, stop=looked.stop), counts

    def _verify(self, path: Path, stop: bulk.Stop) -> bulk.Outcome:
        """Check that a voice is registered as its file has it.

        Raises: RemoteError: It is not. StoppedError.
        """
        bundled, answered = self._arrived[path]
        ref, name = answered.get("id") or answered["name"], answered["name"]
        found = bulk.patiently(partial(self._target.find, ref), stop)
        if found is None:
            raise errors.RemoteError("it was imported, and is not registered")
        if found.get("audio_lost"):
            raise errors.RemoteError("it is registered; its reference audio is lost")
        if differing := differences(bundled, name, found):
            raise errors.RemoteError(f"it differs in {', '.join(differing)}")
        has_its_id = bundled.id is not None and bundled.id == found.get("id")
        details = {"has_its_id": has_its_id}
        return bulk.Outcome(name=str(path), outcome=_THERE, details=details)

    def _find_equal(
        self, bundled: BundledVoice, stop: bulk.Stop
    ) -> Mapping[str, Any] | None:
        """Return the registered voice that equals a bundle, or None.

        Raises: SpeakerExistsError if the voice differs and ``on_conflict`` is ``fail``.
        """
        name = self._name or bundled.name
        for ref in filter(None, (bundled.id, name)):
            found = bulk.patiently(partial(self._target.find, ref), stop)
            if found is None:
                continue
            is_it = self._name is None and found.get("id") == bundled.id
            # An earlier import may have renamed the voice, as its own name was taken.
            renamed = is_it and self._on_conflict == "rename"
            differing = differences(bundled, found["name"] if renamed else name, found)
            if not differing:
                return found
            if is_it and self._on_conflict == "fail":
                hint = f"and differs in {', '.join(differing)}; see --on-conflict"
                raise errors.SpeakerExistsError(found["name"], hint=hint)
        return None


def differences(
    bundled: BundledVoice, name: str, there: Mapping[str, Any]
) -> list[str]:
    """Return the fields in which a registered voice differs from a bundle's.

    An import may give a consent recording another id: only its presence counts.
    """
    expires_at = None if bundled.expires_at is None else int(bundled.expires_at)
    ours = {
        "name": name,
        "audio_sha256": bundled.audio_sha256,
        "ref_text": bundled.ref_text,
        "speaker_description": bundled.description,
        "language": bundled.language,
        "labels": bundled.labels,
        "expires_at": expires_at,
    }
    if name == bundled.name:  # else a copy, which leaves aliases to who has them
        ours |= {extra: bundled.extras.get(extra) for extra in EXTRAS}
    theirs = {"labels": {}, **there}
    if bundled.audio_sha256 is None and bundled.id == there.get("id"):
        # Without audio to compare, another date shows another registration.
        ours["created_at"] = int(bundled.created_at or 0)
    found = [field for field, value in ours.items() if value != theirs.get(field)]
    if bundled.consent_recording is None:
        has_consent = bundled.consent == there.get("consent")
    else:
        has_consent = there.get("consent_id") is not None
    return found if has_consent else [*found, "consent"]


def _read(path: Path) -> bytes:
    with storage_errors(path), path.open("rb") as file:
        # One byte too many, so that the server refuses a file that is too large.
        return file.read(bundle_format.MAX_BYTES + 1)


def _bundled(data: bytes) -> BundledVoice | None:
    """Return the voice of a bundle; None for an invalid one, which a server refuses."""
    try:
        return bundle_format.read(data, b"").voice
    except errors.InvalidBundleError:
        return None


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
    directory: Path, tenant: str | None, *, writes: bool
) -> Iterator[VoicesDirectory]:
    """Open a directory of voices.

    Raises:
        ConfigError: No server has stored voices there; or, with ``writes``, one runs.
        StorageError: The directory cannot be read.
    """
    settings = settings_of(directory)
    with closing(open_existing(settings)) as store:
        if writes:
            check_stopped(store)
        yield VoicesDirectory(store, settings.bundle_key, tenant or DEFAULT_TENANT)


def settings_of(directory: Path | None) -> Settings:
    """Return the environment's settings, with ``directory`` if one is given.

    Raises: ConfigError.
    """
    if directory is None:
        return load_settings()
    # Set before the settings are read: a user without a home directory has no default.
    where = str(expanded(directory).absolute())
    return load_settings({**os.environ, "SPEAKER_SAMPLES_DIR": where})


def check_stopped(store: SpeakerStore) -> None:
    """Refuse to write where a server is at work. Raises: ConfigError."""
    if num_alive := store.participants.num_alive():
        raise errors.ConfigError(
            f"{store.directory} is in use: {num_alive} API servers have it open. Use "
            "--url in place of --directory, or stop the server first."
        )
