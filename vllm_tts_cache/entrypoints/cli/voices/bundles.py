"""``voices export`` and ``import``: voices as files; and ``try``, which speaks."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.entrypoints.cli.style import examples
from vllm_tts_cache.entrypoints.cli.voices.listing import (
    All,
    Chosen,
    Names,
    chosen_of,
    file_names,
)
from vllm_tts_cache.entrypoints.cli.voices.source import (
    DEFAULT_URL,
    ApiKey,
    Directory,
    Jobs,
    Labels,
    OnConflict,
    Search,
    TenantName,
    Url,
    Voices,
    client_of,
    voices_of,
)
from vllm_tts_cache.errors import ConfigError, StorageError
from vllm_tts_cache.files import PARTIAL_PREFIX, storage_errors

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient
    from vllm_tts_cache.entrypoints.cli.voices.bulk import Outcome, Stop

_RESUME = "Run the same command again to go on: what the server has is left alone."
_VERIFIED = (
    "verified: {there} of {voices} voices are there as in their files, "
    "{with_their_ids} with their ids"
)
_EXPORT_ON = "Run the same command again to go on: files that are there are left alone."

_STANDARD = Path("-")
DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog."

_SIZE_AT_END = 8  # of the header's "RIFF", its size, and "WAVE"


@contextmanager
def whole_file(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Give a file that takes its place at ``path`` when the block ends well.

    Raises:
        StorageError: Something is there, and is not to be replaced, or is no file.
        OSError: It cannot be written.
    """
    # A rename would put a file in the place of a device, for all who use it.
    if path.exists() and not path.is_file():
        raise StorageError(f"{path} is no file that could be replaced")
    if path.exists() and not force:
        raise StorageError(f"{path} is there already; --force replaces it")
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=PARTIAL_PREFIX)
    try:
        # Whole, or not there: somebody may restore from it one day.
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)


def export(
    names: Names = None,
    all_: All = False,
    search: Search = None,
    label: Labels = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="where to; made if it is not there"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="replace files that are there")
    ] = False,
    jobs: Jobs = 2,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    directory: Directory = None,
    tenant: TenantName = None,
    as_json: style.Json = False,
) -> None:
    """Save voices as files, one NAME.voice each: audio, texts, consent and encodings.

    A file that holds the voice as it is now is left alone, so a run that was cut short
    goes on when it is run again.

    JSON: {"counts", "interrupted", "voices": [{"name", "outcome":
    "exported|unchanged|failed|not_tried", "file", "bytes", "error"}]}.
    """
    from vllm_tts_cache.entrypoints.cli.voices.bulk import in_parallel, patiently
    from vllm_tts_cache.entrypoints.cli.voices.library import (
        SUFFIX,
        num_left_consents,
    )

    with voices_of(url, api_key, directory, tenant) as source:
        chosen = chosen_of(source, names, all_, {"search": search, "label": label})
        if all_ and not (search or label) and (left := num_left_consents(source)):
            style.note(
                f"{left} consent recordings stay behind: no voice stands on them, and "
                "a file holds its voice's recording alone"
            )
        folder = out or Path()
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

        paths = {
            voice: folder / f"{name}{SUFFIX}"
            for voice, name in file_names(chosen).items()
        }

        def one(voice: Chosen, stop: "Stop") -> "Outcome":
            path = paths[voice]
            return patiently(lambda: _save(source, voice, path, force=force), stop)

        many = in_parallel(
            chosen,
            one,
            name=lambda voice: voice.name,
            title="exporting",
            num_jobs=jobs,
        )
    many.report("voices", as_json=as_json, hint=_EXPORT_ON)


def _save(source: Voices, voice: Chosen, path: Path, *, force: bool) -> "Outcome":
    from vllm_tts_cache.entrypoints.cli.voices.bulk import Outcome
    from vllm_tts_cache.entrypoints.cli.voices.library import holds

    if path.is_file() and not force and holds(path, source.find(voice.ref)):
        details: dict[str, Any] = {"file": str(path)}
        return Outcome(name=voice.name, outcome="unchanged", details=details)
    with whole_file(path, force=force) as file:
        num_bytes = source.save_bundle(voice.ref, file)
    details = {"file": str(path), "bytes": num_bytes}
    return Outcome(name=voice.name, outcome="exported", details=details)


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="or a folder, for all .voice files in it"),
    ],
    name: Annotated[str | None, typer.Option(help="of the voice of one file")] = None,
    on_conflict: Annotated[
        OnConflict,
        typer.Option(help="what to do where another voice has the name"),
    ] = "fail",
    jobs: Jobs = 2,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    directory: Directory = None,
    tenant: TenantName = None,
    as_json: style.Json = False,
) -> None:
    """Register the voices of files that `voices export` wrote.

    A voice that the server has with the same clip and the same texts is left alone, so
    a run that was cut short goes on when it is run again. Of files that this server
    signed, or one with the same SPEAKER_BUNDLE_KEY, encodings are taken, and ids and
    dates are kept where no other voice has the id; else encodings are made anew, and
    ids and dates are new. With --directory that is done to a stopped server's voices,
    without what its model would refuse.

    At the end each voice is looked up and held against its file. Status 1: one failed,
    or is not there as its file has it.

    JSON: {"counts", "interrupted", "files": [{"name": the file, "outcome":
    "imported|unchanged|expired|failed|not_tried", "imported": as the server answers it,
    "error"}], "verified": {"voices", "there", "with_their_ids"}}.
    """
    from vllm_tts_cache.entrypoints.cli.voices.bulk import in_parallel
    from vllm_tts_cache.entrypoints.cli.voices.library import Importing, files_of

    files = files_of(files)
    if name is not None and len(files) > 1:
        raise ConfigError("--name: give it with one file")
    with voices_of(url, api_key, directory, tenant, writes=True) as target:
        importing = Importing(target, name, on_conflict)
        many = in_parallel(
            files,
            importing.add,
            name=str,
            title="importing",
            num_jobs=jobs,
        )
        verified = None
        if not many.stop.event.is_set():
            many, verified = importing.verified(many, jobs)
    if not as_json:
        for each in many.outcomes:
            for imported in each.details.get("imported") or ():
                style.say(f"{each.name}: {_imported(imported)}")
        if verified is not None:
            style.say(_VERIFIED.format(**verified))
    many.report("files", as_json=as_json, hint=_RESUME, more={"verified": verified})


def _imported(found: dict[str, Any]) -> str:
    kept, left = found.get("encodings_kept"), found.get("encodings_left")
    name = (found.get("voice") or {}).get("name")
    return f"{name} ({kept} encodings taken, {left} made anew)"


def try_(
    name: Annotated[str, typer.Argument(help="or id")],
    text: Annotated[str, typer.Argument(help="what to say")] = DEFAULT_TEXT,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.wav",
            help="where to; - is the standard output",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="(default: the one that is served)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="for the same audio again")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: style.Json = False,
) -> None:
    """Speak with a voice, and say how long the first audio took.

    The cache says hit (nothing had to be encoded), miss (this request waited for an
    encode) or none.

    JSON: {"voice", "cache", "bytes", "seconds_to_first_audio", "seconds", "file"}.
    """
    is_audio_out = out == _STANDARD
    if is_audio_out and as_json:
        raise ConfigError("--json: the standard output is the audio's")
    with client_of(url, api_key) as client:
        body = {
            "model": model or client.model(),
            "input": text,
            "voice": name,
            "response_format": "wav",
            "stream": True,
            "stream_format": "audio",
            **({} if seed is None else {"seed": seed}),
        }
        if out is None or is_audio_out:
            found = _speak(client, body, sys.stdout.buffer if is_audio_out else None)
        else:
            found = _speak_to_file(client, body, out)
    found["voice"] = name
    if as_json:
        style.print_json(found)
        return
    tell = style.note if is_audio_out else style.say
    tell(
        f"{name}: first audio after {1000 * found['seconds_to_first_audio']:.0f} ms, "
        f"all ({found['bytes']} bytes) after {found['seconds']:.2f} s; cache: "
        f"{found['cache'] or 'nothing said'}"
    )
    if out is None:
        style.note("not saved; --out FILE.wav saves it")


def _speak_to_file(
    client: "VoicesClient", body: dict[str, Any], out: Path
) -> dict[str, Any]:
    with storage_errors(out), out.open("w+b") as file:
        found = _speak(client, body, file)
        _complete_header(file, found["bytes"])
    return {**found, "file": str(out)}


def _speak(
    client: "VoicesClient", body: dict[str, Any], file: BinaryIO | None
) -> dict[str, Any]:
    began = time.monotonic()
    first, num_bytes = None, 0
    with client.speech(body) as (cache, chunks):
        for chunk in chunks:
            first = time.monotonic() - began if first is None else first
            num_bytes += len(chunk)
            if file is not None:
                file.write(chunk)
    seconds = time.monotonic() - began
    return {
        "cache": cache,
        "bytes": num_bytes,
        "seconds_to_first_audio": round(seconds if first is None else first, 4),
        "seconds": round(seconds, 4),
    }


def _complete_header(file: BinaryIO, num_bytes: int) -> None:
    """Write the length, which nobody knew when the stream began, into a WAV file."""
    file.seek(0)
    head = file.read(4096)
    data = head.find(b"data")
    if not head.startswith(b"RIFF") or data < 0:
        return
    with suppress(OverflowError):  # beyond 4 GiB players go by the file's end
        size = (num_bytes - _SIZE_AT_END).to_bytes(4, "little")
        data_size = (num_bytes - data - _SIZE_AT_END).to_bytes(4, "little")
        file.seek(4)
        file.write(size)
        file.seek(data + 4)
        file.write(data_size)


COMMANDS = {
    "export": (
        export,
        examples(
            "vllm-tts-cache voices export keeper",
            "vllm-tts-cache voices export --all --out backup/",
            "vllm-tts-cache voices export --all --out b/ --directory /srv/speakers",
        ),
    ),
    "import": (
        import_,
        examples(
            "vllm-tts-cache voices import keeper.voice --name keeper-2",
            "vllm-tts-cache voices import backup/*.voice --on-conflict replace",
            "# into a directory whose server is stopped",
            "vllm-tts-cache voices import backup/*.voice --directory /srv/speakers",
            "# a whole library; run it again to go on after Ctrl-C",
            "vllm-tts-cache voices import backup/ --jobs 8",
        ),
    ),
    "try": (
        try_,
        examples(
            "vllm-tts-cache voices try keeper 'Hello there.' --out hello.wav",
            "vllm-tts-cache voices try keeper --out - | aplay",
            "vllm-tts-cache voices try keeper --json | jq .cache",
        ),
    ),
}
