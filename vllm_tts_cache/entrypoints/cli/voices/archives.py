"""Many voices to one file and out of it, one at a time."""

import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.entrypoints.cli.voices.bulk import (
    FAILED,
    Outcome,
    Stop,
    StoppedError,
    in_parallel,
    patiently,
)
from vllm_tts_cache.entrypoints.cli.voices.choosing import Chosen
from vllm_tts_cache.entrypoints.cli.voices.saving import whole_file
from vllm_tts_cache.entrypoints.cli.voices.source import OnConflict, Voices
from vllm_tts_cache.errors import ConfigError, InvalidBundleError
from vllm_tts_cache.files import storage_error, storage_errors
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.archive_format import (
    ArchiveReader,
    ArchiveWriter,
    is_archive,
)
from vllm_tts_cache.store.bundle_format import BundledVoice

_STANDARD = Path("-")
_HEAD_BYTES = 512
_IN_MEMORY_BYTES = 8 * 1024 * 1024


def save_archive(
    source: Voices,
    chosen: list[Chosen],
    path: Path,
    *,
    force: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Write an archive of these voices, and report.

    Raises: ConfigError, StorageError, typer.Exit.
    """
    is_stream = path == _STANDARD
    if is_stream and as_json:
        raise ConfigError("--json: the standard output is the archive's")
    with storage_errors(path), ExitStack() as opened:
        if is_stream:
            file: IO[bytes] = sys.stdout.buffer
        else:
            file = opened.enter_context(whole_file(path, force=force))
        adding = _Adding(source, file, path)
        many = in_parallel(
            chosen,
            adding.add,
            name=lambda voice: voice.name,
            title="exporting",
            num_jobs=jobs,
        )
        if many.stop.event.is_set():
            # Without an end it is no archive, and a file of this kind none to keep.
            style.note("It was cut short, and there is no archive. Run it again.")
            many.report("voices", as_json=as_json, say=_say(is_stream))
        adding.end(many.outcomes)
    many.report("voices", as_json=as_json, say=_say(is_stream))


def _say(is_stream: bool) -> Any:
    return style.note if is_stream else style.say


class _Adding:
    """Adds voices to an archive, as they come."""

    def __init__(self, source: Voices, file: IO[bytes], path: Path):
        self._source = source
        self._file = file
        self._path = path
        self._writer = ArchiveWriter()
        self._turn = threading.Lock()

    def add(self, voice: Chosen, stop: Stop) -> Outcome:
        """Fetch a voice's bundle whole, then write it.

        Raises: StoppedError, and as `Voices.save_bundle`.
        """
        with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as bundle:

            def fetch() -> int:
                bundle.seek(0)
                bundle.truncate()
                return self._source.save_bundle(voice.ref, bundle)

            num_bytes = patiently(fetch, stop)
            bundle.seek(0)
            with self._turn:
                if stop.event.is_set():
                    raise StoppedError
                try:
                    self._append(voice.name, num_bytes, bundle)
                except OSError as exc:
                    # Half of a voice is in it: it can only be thrown away.
                    stop.give_up(storage_error(self._path, exc))
                    raise StoppedError from exc
        return Outcome(
            name=voice.name, outcome="exported", details={"bytes": num_bytes}
        )

    def end(self, outcomes: Any) -> None:
        """Write what there is to say of it.

        Raises: OSError.
        """
        for each in outcomes:
            if each.outcome == FAILED:
                self._writer.leave_out(each.name, each.error or "")
        self._file.write(self._writer.end())
        self._file.flush()

    def _append(self, name: str, num_bytes: int, bundle: IO[bytes]) -> None:
        before, behind = self._writer.voice(name, num_bytes)
        self._file.write(before)
        shutil.copyfileobj(bundle, self._file)
        self._file.write(behind)
        self._file.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBundle:
    """A bundle that is to be imported.

    Attributes:
        shown: What it is called in a report: of an archive ``FILE:NAME``.
        data: The bundle, as far as is known yet.
    """

    shown: str
    data: bytes


def holds_many(path: Path) -> bool:
    """Whether a file is an archive; what cannot be read is said when it is read."""
    if path == _STANDARD:
        return True
    with suppress(OSError), path.open("rb") as file:
        return is_archive(file.read(_HEAD_BYTES))
    return False


def bundles_of(files: list[Path]) -> Iterator[GivenBundle]:
    """Yield the bundles of files, each a bundle or an archive.

    Raises:
        InvalidArchiveError: The rest of an archive cannot be read.
        StorageError: A file cannot be read.
    """
    for path in files:
        with storage_errors(path):
            if path == _STANDARD:
                yield from _of_archive("-", sys.stdin.buffer)
                continue
            with path.open("rb") as file:
                if is_archive(file.peek(_HEAD_BYTES)):
                    yield from _of_archive(str(path), file)
                    continue
                # One byte too many is enough for the server to say so.
                data = file.read(bundle_format.MAX_BYTES + 1)
            yield GivenBundle(shown=str(path), data=data)


def _of_archive(shown: str, file: IO[bytes]) -> Iterator[GivenBundle]:
    archive = ArchiveReader(file)
    for member in archive:
        yield GivenBundle(shown=f"{shown}:{member.name}", data=member.data)
    if archive.summary is None:
        style.note(f"{shown}: it does not say how many voices it should hold")
        return
    for voice in archive.summary.left_out:
        style.note(f"{shown}: {voice.name} was left out of it: {voice.reason}")
    if more := archive.summary.num_left_out - len(archive.summary.left_out):
        style.note(f"{shown}: {more} more were left out of it")


class Importing:
    """Registers bundles, unless their voices are there.

    Args:
        target: Where to.
        name: What the voice is to be called; None for what its bundle calls it.
        on_conflict: What to do where another voice has the name.
    """

    def __init__(self, target: Voices, name: str | None, on_conflict: OnConflict):
        self._target = target
        self._name = name
        self._on_conflict: OnConflict = on_conflict

    def add(self, given: GivenBundle, stop: Stop) -> Outcome:
        """Import one.

        Raises: RemoteError, StoppedError.
        """
        there, on_conflict = self._there(given.data, stop), self._on_conflict
        if there is not None and there.get("audio_lost"):
            on_conflict = "replace"  # it is what is there, but for that
        elif there is not None:
            details = {"id": there.get("id")}
            return Outcome(name=given.shown, outcome="unchanged", details=details)
        send = partial(self._target.add_bundle, given.data, self._name, on_conflict)
        answer = patiently(send, stop)
        return Outcome(name=given.shown, outcome="imported", details=answer)

    def _there(self, data: bytes, stop: Stop) -> Mapping[str, Any] | None:
        """The voice of a bundle, if it is there as it is."""
        try:
            told = bundle_format.read(data, b"").voice
        except InvalidBundleError:
            return None  # who registers it says best what is wrong with it
        name = self._name or told.name
        found = patiently(lambda: self._target.find(name), stop)
        return found if found is not None and _is_same(told, name, found) else None


def _is_same(told: BundledVoice, name: str, there: Mapping[str, Any]) -> bool:
    """Whether a registered voice is what a bundle tells of it.

    A recording gets another id where it is imported, so that it is there is enough.
    """
    if told.consent_recording is None:
        is_same_consent = told.consent == there.get("consent")
    else:
        is_same_consent = there.get("consent_id") is not None
    ours = {
        "name": name,
        "audio_sha256": told.audio_sha256,
        "ref_text": told.ref_text,
        "speaker_description": told.description,
        "language": told.language,
        "labels": told.labels,
        "pinned": told.pinned,
        "expires_at": None if told.expires_at is None else int(told.expires_at),
    }
    theirs = {"labels": {}, "pinned": False, **there}
    return is_same_consent and all(ours[each] == theirs.get(each) for each in ours)
