"""``voices export`` and ``voices import``: voices as files."""

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.entrypoints.cli.voices import bulk, registered
from vllm_tts_cache.errors import ConfigError, StorageError
from vllm_tts_cache.files import PARTIAL_PREFIX, publish, storage_errors

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
    from vllm_tts_cache.entrypoints.cli.voices import library

    def save(voice: registered.Chosen) -> bulk.Outcome:
        path = folder / f"{files[voice]}{library.SUFFIX}"
        details: dict[str, Any] = {"file": str(path)}
        if path.is_file() and not force and library.holds(path, source.find(voice.ref)):
            return bulk.Outcome(name=voice.name, outcome="unchanged", details=details)
        # A rename would replace a device by a file, for all its users.
        if path.exists() and not path.is_file():
            raise StorageError(f"{path} is no regular file; export to another --out")
        if path.exists() and not force:
            raise StorageError(f"{path} is there already; --force replaces it")
        data = source.bundle(voice.ref)
        publish(path, data, prefix=EXPORT_PREFIX)
        details["bytes"] = len(data)
        return bulk.Outcome(name=voice.name, outcome="exported", details=details)

    def one(voice: registered.Chosen, stop: bulk.Stop) -> bulk.Outcome:
        return bulk.patiently(lambda: save(voice), stop)

    with registered.voices_of(url, api_key, directory, tenant) as source:
        chosen = registered.chosen_of(
            source, names, all_, {"search": search, "label": label}
        )
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
    # Not at the top: the import takes longer than printing the help.
    from vllm_tts_cache.catalogue.names import fold

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
    from vllm_tts_cache.entrypoints.cli.voices.library import Importing, files_of

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
