"""``voices export`` and ``voices import``: voices as files."""

import fcntl
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.entrypoints.cli.voices import bulk, registered
from vllm_tts_cache.errors import (
    ConfigError,
    InvalidBundleError,
    RemoteError,
    SpeakerExistsError,
    StorageError,
)
from vllm_tts_cache.files import PARTIAL_PREFIX, publish, storage_errors

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient
    from vllm_tts_cache.entrypoints.cli.voices.directory import VoicesDirectory
    from vllm_tts_cache.store.bundle_format import BundledVoice

_SUFFIX = ".voice"
_EXPIRED, _THERE = "expired", "there"
# An id and the suffix follow in a file's name, which may have 255 bytes.
_MAX_NAME_BYTES = 200
EXPORT_PREFIX = f"{PARTIAL_PREFIX}export-"
_RESUME = "Run the same command again to go on: what the server has is left alone."
_VERIFIED = (
    "verified: {there} of {voices} voices are there as in their files, "
    "{with_their_ids} with their ids"
)
_EXPORT_ON = "Run the same command again to go on: files that are there are left alone."


def export(
    names: registered.Names = None,
    all_: registered.All = False,
    search: common.Search = None,
    label: common.Labels = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="where to; made if it is not there"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="replace files that are there")
    ] = False,
    jobs: common.Jobs = 2,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    directory: common.Directory = None,
    tenant: common.TenantName = None,
    as_json: common.Json = False,
) -> None:
    """Save voices as files, one NAME.voice each: audio, texts, consent and encodings.

    A file that holds the voice as it is now is left alone, so a run that was cut short
    goes on when it is run again. A consent recording that no voice stands on stays
    behind.

    JSON: {"counts", "interrupted", "voices": [{"name", "outcome":
    "exported|unchanged|failed|not_tried", "file", "bytes", "error"}]}.
    """

    def save(voice: registered.Chosen) -> bulk.Outcome:
        path = folder / f"{files[voice]}{_SUFFIX}"
        details: dict[str, Any] = {"file": str(path)}
        if path.is_file() and not force and holds(path, source.find(voice.ref)):
            return bulk.Outcome(voice.name, "unchanged", details=details)
        # A rename would replace a device by a file, for all its users.
        if path.exists() and not path.is_file():
            raise StorageError(f"{path} is no regular file; export to another --out")
        if path.exists() and not force:
            raise StorageError(f"{path} is there already; --force replaces it")
        data = source.bundle(voice.ref)
        publish(path, data, prefix=EXPORT_PREFIX)
        details["bytes"] = len(data)
        return bulk.Outcome(voice.name, "exported", details=details)

    def one(voice: registered.Chosen, stop: bulk.Stop) -> bulk.Outcome:
        return bulk.patiently(save, voice, stop=stop)

    with registered.voices_of(url, api_key, directory, tenant) as source:
        query = {"search": search, "label": label}
        chosen = registered.chosen_of(source, names, all_, query)
        files = file_names(chosen)
        with export_folder(out or Path()) as folder:
            many = bulk.in_parallel(chosen, one, title="exporting", num_jobs=jobs)
    many.report("voices", as_json=as_json, hint=_EXPORT_ON)


@contextmanager
def export_folder(folder: Path) -> Iterator[Path]:
    """Make the folder, and remove the partial files of exports that were killed.

    Every export holds a shared lock on its folder. If this one gets the lock alone, no
    running export has partial files there.
    """
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in folder.glob(f"{EXPORT_PREFIX}*"):
                left.unlink(missing_ok=True)
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield folder
    finally:
        os.close(handle)


def file_names(chosen: Sequence[registered.Chosen]) -> dict[registered.Chosen, str]:
    """Return each voice's file name without its ending; no two are the same.

    It is the voice's name, as far as a file's can hold it. Names that would be the same
    get the voice's id appended, or a hash of the name if no id is known.
    """
    found = {each: _safe_name(each.name) for each in chosen}
    plain = set(found)
    while True:
        # Some file systems ignore case, so names are compared folded.
        counts = Counter(map(fold, found.values()))
        meeting = {each for each in plain if counts[fold(found[each])] > 1}
        if not meeting:
            return found
        # A new name may be the same as another voice's.
        plain -= meeting
        found |= {each: f"{found[each]}-{_tag(each)}" for each in meeting}


def _safe_name(name: str) -> str:
    """Return a voice's name as part of a file's; stock's names may hold anything."""
    safe = "".join(
        "_" if not character.isprintable() or character in "/\\" else character
        for character in name
    )
    encoded = safe.lstrip(".").encode(errors="replace")
    shown = encoded[:_MAX_NAME_BYTES].decode(errors="ignore")
    return shown or "voice"


def _tag(chosen: registered.Chosen) -> str:
    if chosen.ref != chosen.name:
        return chosen.ref
    return hashlib.sha256(chosen.name.encode(errors="replace")).hexdigest()[:32]


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="or a folder, for all .voice files in it"),
    ],
    name: Annotated[str | None, typer.Option(help="of the voice of one file")] = None,
    on_conflict: Annotated[
        common.OnConflict,
        typer.Option(help="what to do where another voice has the name"),
    ] = "fail",
    jobs: common.Jobs = 2,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    directory: common.Directory = None,
    tenant: common.TenantName = None,
    as_json: common.Json = False,
) -> None:
    """Register the voices of files that `voices export` wrote.

    A voice that the server has with the same clip and the same texts is left alone, so
    a run that was cut short goes on when it is run again. From files that this server
    signed, or one with the same SPEAKER_BUNDLE_KEY, encodings are taken, and ids and
    dates are kept where no other voice has the id; else encodings are made anew, and
    ids and dates are new. With --directory the voices go to a stopped server, without
    the checks of its model.

    At the end each voice is looked up and compared with its file. Status 1: one failed,
    or is not there as its file has it.

    JSON: {"counts", "interrupted", "files": [{"name": the file, "outcome":
    "imported|unchanged|expired|failed|not_tried", "imported": as the server answers it,
    "error"}], "verified": {"voices", "there", "with_their_ids"}}.
    """
    files = files_of(files)
    if name is not None and len(files) > 1:
        raise ConfigError(f"--name names one voice, and {len(files)} files are given")
    with registered.voices_of(url, api_key, directory, tenant, writes=True) as target:
        importing = Importing(target, name, on_conflict)
        many = bulk.in_parallel(files, importing.add, title="importing", num_jobs=jobs)
        verified = None
        if not many.stop.is_set():
            many, verified = importing.verified(many, jobs)
    if not as_json:
        for each in many.outcomes:
            for imported in each.details.get("imported") or ():
                kept = imported.get("encodings_kept")
                voice = (imported.get("voice") or {}).get("name")
                made = imported.get("encodings_left")
                common.say(
                    f"{each.name}: {voice} ({kept} encodings taken, {made} made anew)"
                )
        if verified is not None:
            common.say(_VERIFIED.format(**verified))
    many.report("files", as_json=as_json, hint=_RESUME, more={"verified": verified})


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the named files, and the voice files in the named folders.

    Raises: ConfigError: A folder holds no voice file. StorageError.
    """
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        with storage_errors(path):
            found = sorted(path.glob(f"*{_SUFFIX}"))
        if not found:
            raise ConfigError(f"{path} holds no file that ends in {_SUFFIX}")
        files += found
    return files


def holds(path: Path, there: Mapping[str, Any] | None) -> bool:
    """Whether a file holds a registered voice as it is now. Raises: StorageError."""
    _, bundled = _read(path)
    if bundled is None or there is None or bundled.id != there.get("id"):
        return False
    return not differences(bundled, bundled.name, there)


class Importing:
    """Registers the voices of bundles that are missing, and verifies all of them."""

    def __init__(
        self,
        target: "VoicesClient | VoicesDirectory",
        name: str | None,
        on_conflict: common.OnConflict,
    ):
        self._target = target
        self._name = name
        self._on_conflict: common.OnConflict = on_conflict
        # File -> the voice in it, and the registered voice that the library answered.
        self._arrived: dict[Path, tuple[BundledVoice, Mapping[str, Any]]] = {}

    def add(self, path: Path, stop: bulk.Stop) -> bulk.Outcome:
        """Import a file, unless its voice is registered or has expired.

        Raises: RemoteError, SpeakerExistsError, StorageError, StoppedError.
        """
        data, bundled = _read(path)
        on_conflict = self._on_conflict
        if bundled is not None:
            there, end = self._find_equal(bundled, stop), bundled.expires_at
            if there is not None and there.get("audio_lost"):
                on_conflict = "replace"  # the same voice is registered, without audio
            elif there is not None:
                self._arrived[path] = bundled, there
                details = {"id": there.get("id")}
                return bulk.Outcome(str(path), "unchanged", details=details)
            elif end is not None and end <= time.time():
                return bulk.Outcome(str(path), _EXPIRED)
        asked = data, self._name, on_conflict
        answer = bulk.written_once(self._target.add_bundle, *asked, stop=stop)
        if bundled is not None:
            self._arrived[path] = bundled, answer["imported"][0]["voice"]
        return bulk.Outcome(str(path), "imported", details=answer)

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
        found = bulk.patiently(self._target.find, ref, stop=stop)
        if found is None:
            raise RemoteError("it was imported, and is not registered")
        if found.get("audio_lost"):
            raise RemoteError("it is registered; its reference audio is lost")
        if differing := differences(bundled, name, found):
            raise RemoteError(f"it differs in {', '.join(differing)}")
        has_its_id = bundled.id is not None and bundled.id == found.get("id")
        return bulk.Outcome(str(path), _THERE, details={"has_its_id": has_its_id})

    def _find_equal(
        self, bundled: "BundledVoice", stop: bulk.Stop
    ) -> Mapping[str, Any] | None:
        """Return the registered voice that equals a bundle, or None.

        Raises: SpeakerExistsError if the voice differs and ``on_conflict`` is ``fail``.
        """
        name = self._name or bundled.name
        for ref in filter(None, (bundled.id, name)):
            found = bulk.patiently(self._target.find, ref, stop=stop)
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
                raise SpeakerExistsError(found["name"], hint=hint)
        return None


def differences(
    bundled: "BundledVoice", name: str, there: Mapping[str, Any]
) -> list[str]:
    """Return the fields in which a registered voice differs from a bundle's.

    An import may give a consent recording another id: only its presence counts.
    """
    from vllm_tts_cache.catalogue.records import EXTRAS

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


def _read(path: Path) -> "tuple[bytes, BundledVoice | None]":
    """Read a file, and the voice in it: None in an invalid one, which a server refuses.

    Raises: StorageError.
    """
    from vllm_tts_cache.store import bundle_format

    with storage_errors(path), path.open("rb") as file:
        # One byte too many, so that the server refuses a file that is too large.
        data = file.read(bundle_format.MAX_BYTES + 1)
    try:
        return data, bundle_format.read(data, b"").voice
    except InvalidBundleError:
        return data, None
