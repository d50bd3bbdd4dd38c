"""Voices in files, held against what is registered: imported, and seen to be there."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_tts_cache.entrypoints.cli.voices.bulk import (
    FAILED,
    Many,
    Outcome,
    Stop,
    in_parallel,
    patiently,
)
from vllm_tts_cache.entrypoints.cli.voices.source import OnConflict, Voices
from vllm_tts_cache.errors import (
    ConfigError,
    InvalidBundleError,
    RouteMissingError,
    SpeakerExistsError,
)
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.bundle_format import BundledVoice

SUFFIX = ".voice"
_EXPIRED, _THERE = "expired", "there"


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files that are named, and those of the folders that are.

    Raises:
        ConfigError: A folder holds none.
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
            raise ConfigError(f"{path}: it holds no file that ends in {SUFFIX}")
        files += found
    return files


def num_left_consents(source: Voices) -> int:
    """Return how many consent recordings no voice stands on.

    Raises: RemoteError, StorageError.
    """
    try:
        left = {each["id"] for each in source.consents()}
    except RouteMissingError:  # stock vLLM-Omni keeps none
        return 0
    if left:
        left -= {each.get("consent_id") for each in source.voices()}
    return len(left)


def holds(path: Path, there: Mapping[str, Any] | None) -> bool:
    """Whether a file holds a registered voice as it is.

    Raises: StorageError.
    """
    told = _told(_read(path))
    if told is None or there is None:
        return False
    return told.id == there.get("id") and not differences(told, told.name, there)


class Importing:
    """Registers bundles, unless their voices are there, and looks whether all are.

    Args:
        target: Where to.
        name: What the voice is to be called; None for what its bundle calls it.
        on_conflict: What to do where another voice has the name.
    """

    def __init__(self, target: Voices, name: str | None, on_conflict: OnConflict):
        self._target = target
        self._name = name
        self._on_conflict: OnConflict = on_conflict
        # By its file: what that says of a voice, and what the library answered.
        self._arrived: dict[Path, tuple[BundledVoice, Mapping[str, Any]]] = {}

    def add(self, path: Path, stop: Stop) -> Outcome:
        """Import one.

        Raises: RemoteError, SpeakerExistsError, StorageError, StoppedError.
        """
        data = _read(path)
        told, on_conflict = _told(data), self._on_conflict
        there = None if told is None else self._there(told, stop)
        if there is not None and there.get("audio_lost"):
            on_conflict = "replace"  # it is what is there, but for that
        elif told is not None and there is not None:
            details = {"id": there.get("id")}
            self._arrived[path] = told, there
            return Outcome(name=str(path), outcome="unchanged", details=details)
        elif told is not None and _has_expired(told):
            return Outcome(name=str(path), outcome=_EXPIRED)
        send = partial(self._target.add_bundle, data, self._name, on_conflict)
        answer = patiently(send, stop)
        if told is not None:
            self._arrived[path] = told, answer["imported"][0]["voice"]
        return Outcome(name=str(path), outcome="imported", details=answer)

    def verified(self, many: Many, num_jobs: int) -> tuple[Many, dict[str, int]]:
        """Ask the library for each voice once more, and hold it against its file.

        Returns:
            What became of all, in which one that is not there has failed; how many
            voices there are in files that have not expired, how many of them are
            there, and how many of those have the ids of their files.
        """
        looked = in_parallel(
            list(self._arrived),
            self._look,
            name=str,
            title="verifying",
            num_jobs=num_jobs,
        )
        by_name = {each.name: each for each in looked.outcomes}
        outcomes = [
            found
            if (found := by_name.get(each.name)) is not None and found.error is not None
            else each
            for each in many.outcomes
        ]
        num_expired = sum(each.outcome == _EXPIRED for each in many.outcomes)
        there = [each for each in looked.outcomes if each.outcome == _THERE]
        counts = {
            "voices": len(outcomes) - num_expired,
            "there": len(there),
            "with_their_ids": sum(each.details["has_its_id"] for each in there),
        }
        return Many(outcomes=outcomes, stop=looked.stop), counts

    def _look(self, path: Path, stop: Stop) -> Outcome:
        """Look whether a voice is there as its file says.

        Raises: RemoteError, StoppedError.
        """
        told, answered = self._arrived[path]
        ref, name = answered.get("id") or answered["name"], answered["name"]
        found = patiently(lambda: self._target.find(ref), stop)
        if found is None:
            problem = "it was imported, and is not there"
        elif found.get("audio_lost"):
            problem = "it is there, and its reference audio is lost"
        elif differing := differences(told, name, found):
            problem = f"it is there with other {', '.join(differing)}"
        else:
            details = {"has_its_id": told.id is not None and told.id == found.get("id")}
            return Outcome(name=str(path), outcome=_THERE, details=details)
        return Outcome(name=str(path), outcome=FAILED, error=problem)

    def _there(self, told: BundledVoice, stop: Stop) -> Mapping[str, Any] | None:
        """Return the voice of a bundle if it is there as it is.

        Raises: SpeakerExistsError if it is there, and was changed.
        """
        name = self._name or told.name
        for ref in filter(None, (told.id, name)):
            found = patiently(partial(self._target.find, ref), stop)
            if found is None:
                continue
            is_it = self._name is None and found.get("id") == told.id
            # It may have been given that name where its own was taken.
            renamed = is_it and self._on_conflict == "rename"
            differing = differences(told, found["name"] if renamed else name, found)
            if not differing:
                return found
            if is_it and self._on_conflict == "fail":
                hint = f"with other {', '.join(differing)}; see --on-conflict"
                raise SpeakerExistsError(found["name"], hint=hint)
        return None


def _has_expired(told: BundledVoice) -> bool:
    return told.expires_at is not None and told.expires_at <= time.time()


def differences(told: BundledVoice, name: str, there: Mapping[str, Any]) -> list[str]:
    """Return the fields in which a registered voice is not what a bundle says.

    A recording may have another id where it is imported, so that it is there is enough.
    """
    ours = {
        "name": name,
        "audio_sha256": told.audio_sha256,
        "ref_text": told.ref_text,
        "speaker_description": told.description,
        "language": told.language,
        "labels": told.labels,
        "expires_at": None if told.expires_at is None else int(told.expires_at),
    }
    theirs = {"labels": {}, **there}
    if told.audio_sha256 is None and told.id == there.get("id"):
        # An embedding that is registered over the voice is another registration.
        ours["created_at"] = int(told.created_at or 0)
    found = [field for field, value in ours.items() if value != theirs.get(field)]
    if told.consent_recording is None:
        has_consent = told.consent == there.get("consent")
    else:
        has_consent = there.get("consent_id") is not None
    return found if has_consent else [*found, "consent"]


def _read(path: Path) -> bytes:
    with storage_errors(path), path.open("rb") as file:
        # One byte too many is enough for the server to say so.
        return file.read(bundle_format.MAX_BYTES + 1)


def _told(data: bytes) -> BundledVoice | None:
    """Return what a bundle says; None of what the server is to refuse."""
    try:
        return bundle_format.read(data, b"").voice
    except InvalidBundleError:
        return None
