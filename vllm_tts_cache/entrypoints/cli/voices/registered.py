"""``voices ls``, ``show``, ``warm``, ``edit``, ``rm``, ``usage`` and ``try``."""

import io
import itertools
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.entrypoints.cli.voices import bulk
from vllm_tts_cache.errors import ConfigError, NotThereError, SpeakerNotFoundError

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient
    from vllm_tts_cache.entrypoints.cli.voices.directory import VoicesDirectory

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="or ids")]
All = Annotated[
    bool, typer.Option("--all", help="all voices, or all that --search finds")
]

Day = Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="in UTC")]

DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog."

_TIMES = ("created_at", "updated_at", "expires_at", "next_try_at")
_HEADINGS = ("NAME", "ID", "SECONDS", "LANGUAGE", "EXPIRES", "LABELS")
_USAGE_PAGE = 1000
_USAGE_HEADINGS = ("DAY", "VOICE", "REQUESTS", "CHARACTERS", "SECONDS")
_STDOUT = Path("-")
_FORMATS = ("pcm", "mp3", "opus", "aac", "flac")  # by a file's suffix; else WAV
_SIZE_AT_END = 8  # of the header's "RIFF", its size, and "WAVE"


class Clearable(Enum):
    """What `voices edit --clear` takes away, by the names of the routes' fields."""

    speaker_description = "description"
    language = "language"
    ref_text = "ref-text"
    labels = "labels"
    aliases = "aliases"
    settings = "settings"
    expires_at = "expires-at"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A voice that a command is about.

    Attributes:
        name: What the voice is called in reports.
        ref: What requests name the voice by: the id if it was listed, as the voice may
            be renamed before its turn; else the name or id that was given.
    """

    name: str
    ref: str

    def __str__(self) -> str:
        return self.name


@contextmanager
def voices_of(
    url: str,
    api_key: str | None,
    directory: Path | None,
    tenant: str | None,
    *,
    writes: bool = False,
) -> Iterator["VoicesClient | VoicesDirectory"]:
    """Open the directory if one is given, else yield a client of the URL.

    Raises: ConfigError, StorageError.
    """
    if directory is not None:
        # SQLAlchemy and numpy take longer to import than a client takes for its answer.
        from vllm_tts_cache.entrypoints.cli.voices.directory import open_directory

        with open_directory(directory, tenant, writes=writes) as voices:
            yield voices
    elif tenant is not None:
        raise ConfigError(
            "--tenant goes with --directory; a server takes the tenant from the key "
            "(--api-key)"
        )
    else:
        with common.client_of(url, api_key) as client:
            yield client


def chosen_of(
    source: "VoicesClient | VoicesDirectory",
    names: list[str] | None,
    all_: bool,
    query: dict[str, Any],
) -> list[Chosen]:
    """Return the voices that a command is about. Raises: ConfigError, RemoteError."""
    asks = all_ or any(query.values())
    if bool(names) == asks:
        raise ConfigError("give names, or --all, --search or --label")
    if names:
        return [Chosen(name, name) for name in dict.fromkeys(names)]
    # Stock's server lists no ids.
    listed = source.voices(**query)
    return [Chosen(each["name"], each.get("id") or each["name"]) for each in listed]


def ls(
    search: common.Search = None,
    label: common.Labels = None,
    sort: Annotated[common.Sort, typer.Option(help="the order")] = "name",
    limit: Annotated[int | None, typer.Option(min=1, help="voices at most")] = None,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    directory: common.Directory = None,
    tenant: common.TenantName = None,
    as_json: common.Json = False,
) -> None:
    """List the registered voices.

    JSON: {"voices": [...]}, each as `GET /v1/audio/voices` shows it.
    """
    with voices_of(url, api_key, directory, tenant) as source:
        listed = source.voices(search=search, label=label, sort=sort)
        found = list(itertools.islice(listed, limit))
    if as_json:
        common.print_json({"voices": found})
    elif found:
        common.print_columns(_HEADINGS, map(_row, found))
    else:
        common.note("no voices")


def show(
    name: Annotated[str, typer.Argument(help="or id")],
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    directory: common.Directory = None,
    tenant: common.TenantName = None,
    as_json: common.Json = False,
) -> None:
    """Show a voice and the state of its encodings.

    JSON: what `GET /v1/audio/voices/NAME` answers; of a directory, which knows no
    model, "encoded_by" has the fingerprints of encoders in place of "cache_status".
    """
    with voices_of(url, api_key, directory, tenant) as source:
        _print_voice(source.get(name), as_json)


def _print_voice(answer: dict[str, Any], as_json: bool) -> None:
    """Print an answer: a name and its value per line, without empty values."""
    if as_json:
        common.print_json(answer)
        return
    fields = {**answer.pop("voice", {}), **answer}
    width = max(map(len, fields), default=0)
    for field, value in fields.items():
        if value not in (None, {}, []):
            shown = _time_of(value) if field in _TIMES else _plain(value)
            common.say(f"{field:{width}}  {shown}")


def _time_of(seconds: Any) -> str:
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (TypeError, ValueError, OverflowError, OSError):
        return str(seconds)  # a server of another kind may answer no time


def _row(voice: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = voice.get("duration_seconds")
    return (
        str(voice.get("name", "")),
        str(voice.get("id", "")),
        f"{seconds:.1f}" if isinstance(seconds, float | int) else "",
        str(voice.get("language") or ""),
        _time_of(voice.get("expires_at")),
        _plain(voice.get("labels") or {}),
    )


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}:{each}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, itertools.islice(value, 100)))
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def warm(
    names: Names = None,
    all_: All = False,
    search: common.Search = None,
    label: common.Labels = None,
    force: Annotated[
        bool, typer.Option("--force", help="encode anew, and replace what is there")
    ] = False,
    jobs: common.Jobs = 4,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    as_json: common.Json = False,
) -> None:
    """Make the encodings of voices exist, and wait until they do.

    Several give way to running streams; a single one is made at once.

    JSON: {"counts", "interrupted", "voices": [{"name", "outcome":
    "ready|failed|not_tried", "error"}]}.
    """

    def one(voice: Chosen, stop: bulk.Stop) -> bulk.Outcome:
        is_alone = len(chosen) == 1
        bulk.made(client, voice.ref, stop, urgent=is_alone, force=force)
        return bulk.Outcome(voice.name, "ready")

    with common.client_of(url, api_key) as client:
        chosen = chosen_of(client, names, all_, {"search": search, "label": label})
        many = bulk.in_parallel(chosen, one, title="encoding", num_jobs=jobs)
    many.report("voices", as_json=as_json, hint="Run the same command again to go on.")


def edit(
    name: Annotated[str, typer.Argument(help="or id")],
    new_name: Annotated[str | None, typer.Option("--name", help="rename it")] = None,
    description: common.Description = None,
    language: common.Language = None,
    ref_text: common.RefText = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY:VALUE", help="add or change; repeatable"),
    ] = None,
    unlabel: Annotated[
        list[str] | None,
        typer.Option("--unlabel", metavar="KEY", help="take away; repeatable"),
    ] = None,
    alias: common.Aliases = None,
    setting: common.VoiceSettings = None,
    expires_at: common.ExpiresAt = None,
    clear: Annotated[
        list[Clearable] | None, typer.Option(help="take away; repeatable")
    ] = None,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    as_json: common.Json = False,
) -> None:
    """Change a voice's name, texts, labels or expiry; its audio and its id stay.

    Aliases and settings that are given take the place of those that it had.

    JSON: what `PATCH /v1/audio/voices/NAME` answers.
    """
    given: dict[str, Any] = {
        "name": new_name,
        "speaker_description": description,
        "language": language,
        "ref_text": ref_text,
        "expires_at": expires_at,
        **common.extras_of(alias, setting),
    }
    changes = {field: value for field, value in given.items() if value is not None}
    for field in clear or ():
        changes[field.name] = {} if field is Clearable.labels else None
    if not changes and not label and not unlabel:
        raise ConfigError("say what to change: see --help")
    added = common.pairs(label)
    with common.client_of(url, api_key) as client:
        if added or unlabel:
            before = {} if "labels" in changes else client.get(name)["voice"]["labels"]
            # Keys are compared folded: a new spelling replaces the old one.
            gone = {key.casefold() for key in (*(unlabel or ()), *added)}
            kept = {key: of for key, of in before.items() if key.casefold() not in gone}
            changes["labels"] = {**kept, **added}
        answer = client.change(name, changes)
    _print_voice(answer, as_json)


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="or ids")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    missing_ok: Annotated[
        bool, typer.Option("--missing-ok", help="a voice that is not there is no error")
    ] = False,
    jobs: common.Jobs = 2,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    directory: common.Directory = None,
    tenant: common.TenantName = None,
    as_json: common.Json = False,
) -> None:
    """Delete voices, with all that was made of them; waits until nothing is left.

    On a terminal it asks first. Status 4 if one is not there, unless --missing-ok is
    given.

    JSON: {"counts", "interrupted", "voices": [{"name", "outcome":
    "deleted|missing|failed|not_tried", "error"}]}.
    """
    chosen = list(dict.fromkeys(names))
    if not yes and sys.stdin.isatty():
        what = repr(chosen[0]) if len(chosen) == 1 else f"{len(chosen)} voices"
        typer.confirm(f"Delete {what} for good?", abort=True, err=True)

    def one(name: str, stop: bulk.Stop) -> bulk.Outcome:
        try:
            bulk.written_once(source.delete, name, stop=stop)
        except (SpeakerNotFoundError, NotThereError):
            return bulk.Outcome(name, "missing")
        return bulk.Outcome(name, "deleted")

    with voices_of(url, api_key, directory, tenant, writes=True) as source:
        many = bulk.in_parallel(chosen, one, title="deleting", num_jobs=jobs)
    num_missing = many.counts.get("missing")
    if not as_json:
        for each in many.outcomes:
            if each.outcome == "missing":
                common.note(f"{each.name}: there is no such voice")
    many.report("voices", as_json=as_json)
    common.leave(common.NOT_FOUND if num_missing and not missing_ok else 0)


def usage(
    since: Day = None,
    until: Day = None,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    as_json: common.Json = False,
) -> None:
    """Show how much each voice spoke on each day, by default of the last 30 days.

    JSON: {"data": [{"day", "voice_id", "name", "requests", "characters", "seconds"}],
    "totals": {...}}.
    """
    asked: dict[str, Any] = {"since": since, "until": until, "limit": _USAGE_PAGE}
    asked = {name: value for name, value in asked.items() if value is not None}
    rows: list[dict[str, Any]] = []
    with common.client_of(url, api_key) as client:
        while True:
            page = client.request("GET", "/v1/audio/usage", params=asked)
            rows += page.get("data") or ()
            if not (after := page.get("next")):
                break
            asked["after"] = after
    if as_json:
        common.print_json({"data": rows, "totals": page.get("totals")})
        return
    if rows:
        shown = [_usage_row(row, row["name"] or row["voice_id"]) for row in rows]
        total = _usage_row({"day": "total", **page["totals"]}, "")
        common.print_columns(_USAGE_HEADINGS, [*shown, total])
    else:
        common.note("no voice spoke")


def _usage_row(found: dict[str, Any], name: str) -> tuple[str, ...]:
    counted = str(found["requests"]), str(found["characters"])
    voice = "/".join(filter(None, (found.get("tenant"), name)))
    return (str(found["day"]), voice, *counted, f"{found['seconds']:.1f}")


def try_(
    name: Annotated[str, typer.Argument(help="or id")],
    text: Annotated[str, typer.Argument(help="what to say")] = DEFAULT_TEXT,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE.wav", help="where to; - is the standard output"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="(default: the one that is served)")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="for the same audio again")] = None,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    as_json: common.Json = False,
) -> None:
    """Speak with a voice, and say how long the first audio took.

    The cache says hit (nothing had to be encoded), miss (this request waited for an
    encode) or none.

    JSON: {"voice", "cache", "bytes", "seconds_to_first_audio", "seconds", "file"}.
    """
    is_audio_out = out == _STDOUT
    if is_audio_out and as_json:
        raise ConfigError("--json: with --out - the standard output has the audio")
    suffix = "" if out is None else out.suffix.removeprefix(".").lower()
    with common.client_of(url, api_key) as client:
        body = {
            "model": model or client.model(),
            "input": text,
            "voice": name,
            "response_format": suffix if suffix in _FORMATS else "wav",
            "stream": True,
            "stream_format": "audio",
            **({} if seed is None else {"seed": seed}),
        }
        if out is None or is_audio_out:
            found = _speak(client, body, sys.stdout.buffer if is_audio_out else None)
        else:
            file = io.BytesIO()
            found = _speak(client, body, file)
            # Written at the end: an answer that breaks off leaves what is there.
            out.write_bytes(_with_length(file.getvalue()))
            found["file"] = str(out)
    found["voice"] = name
    if as_json:
        common.print_json(found)
        return
    tell = common.note if is_audio_out else common.say
    tell(
        f"{name}: first audio after {1000 * found['seconds_to_first_audio']:.0f} ms, "
        f"all ({found['bytes']} bytes) after {found['seconds']:.2f} s; cache: "
        f"{found['cache'] or 'nothing said'}"
    )
    if out is None:
        common.note("not saved; --out FILE.wav saves it")


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


def _with_length(audio: bytes) -> bytearray:
    """Write the length, which was not known when the stream began, into a WAV file."""
    completed = bytearray(audio)
    data = audio.find(b"data", 0, 4096)
    if audio.startswith(b"RIFF") and data >= 0:
        with suppress(struct.error):  # beyond 4 GiB players read to the file's end
            struct.pack_into("<I", completed, 4, len(audio) - _SIZE_AT_END)
            size = len(audio) - data - _SIZE_AT_END
            struct.pack_into("<I", completed, data + 4, size)
    return completed
