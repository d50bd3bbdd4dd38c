"""``voices ls`` and ``voices show``, and which voices any command is about."""

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.entrypoints.cli.style import examples
from vllm_tts_cache.entrypoints.cli.voices.source import (
    DEFAULT_URL,
    ApiKey,
    Directory,
    Labels,
    Search,
    Sort,
    TenantName,
    Url,
    Voices,
    voices_of,
)
from vllm_tts_cache.errors import ConfigError

# With what tells it from others a file's name has less than 255 bytes.
_MAX_NAME_BYTES = 200

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="or ids")]
All = Annotated[
    bool, typer.Option("--all", help="all voices, or all that --search finds")
]

_TIMES = ("created_at", "updated_at", "expires_at")
_HEADINGS = ("NAME", "ID", "SECONDS", "LANGUAGE", "EXPIRES", "LABELS")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A voice that a command is about.

    Attributes:
        name: What it is called in reports.
        ref: What it is asked for by: its id, if it was listed, as it may be renamed
            before its turn comes; else what was given.
    """

    name: str
    ref: str


def chosen_of(
    source: Voices, names: list[str] | None, all_: bool, query: dict[str, Any]
) -> list[Chosen]:
    """Return the voices that a command is about.

    Raises: ConfigError, RemoteError.
    """
    asks = all_ or any(query.values())
    if bool(names) == asks:
        raise ConfigError("give names, or --all, --search or --label")
    if names:
        return [Chosen(name, name) for name in dict.fromkeys(names)]
    # Stock's server lists no ids.
    listed = source.voices(**query)
    return [Chosen(each["name"], each.get("id") or each["name"]) for each in listed]


def file_names(chosen: Sequence[Chosen]) -> dict[Chosen, str]:
    """What the file of each is called, without an end: no two the same.

    That is its name as far as a file's can hold it; where those of several would be
    one, each has its id behind it, or a hash of the name where no id is known.
    """
    # Imported here: a listing does without.
    from vllm_tts_cache.catalogue.names import fold

    found = {each: _safe_name(each.name) for each in chosen}
    plain = set(found)
    while True:
        # As file systems compare them that know no case.
        counts = Counter(map(fold, found.values()))
        meeting = {each for each in plain if counts[fold(found[each])] > 1}
        if not meeting:
            return found
        # What they are called now may be what another one is called.
        plain -= meeting
        found |= {each: f"{found[each]}-{_tag(each)}" for each in meeting}


def _safe_name(name: str) -> str:
    """A voice's name as part of a file's; voices of stock's may hold anything."""
    safe = "".join(
        "_" if not character.isprintable() or character in "/\\" else character
        for character in name
    )
    encoded = safe.lstrip(".").encode(errors="replace")
    shown = encoded[:_MAX_NAME_BYTES].decode(errors="ignore")
    return shown or "voice"


def _tag(chosen: Chosen) -> str:
    if chosen.ref != chosen.name:
        return chosen.ref
    return hashlib.sha256(chosen.name.encode(errors="replace")).hexdigest()[:32]


def ls(
    search: Search = None,
    label: Labels = None,
    sort: Annotated[Sort, typer.Option(help="the order")] = "name",
    limit: Annotated[int | None, typer.Option(min=1, help="voices at most")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    directory: Directory = None,
    tenant: TenantName = None,
    as_json: style.Json = False,
) -> None:
    """List the registered voices.

    JSON: {"voices": [...]}, each as `GET /v1/audio/voices` shows it.
    """
    with voices_of(url, api_key, directory, tenant) as source:
        found = source.voices(limit, search=search, label=label, sort=sort)
        found = list(found)
    if as_json:
        style.print_json({"voices": found})
    elif found:
        style.print_columns(_HEADINGS, map(_row, found))
    else:
        style.note("no voices")


def show(
    name: Annotated[str, typer.Argument(help="or id")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    directory: Directory = None,
    tenant: TenantName = None,
    as_json: style.Json = False,
) -> None:
    """Show a voice and the state of its encodings.

    JSON: what `GET /v1/audio/voices/NAME` answers; of a directory, which knows no
    model, "encoded_by" has the fingerprints of encoders in place of "cache_status".
    """
    with voices_of(url, api_key, directory, tenant) as source:
        found = source.get(name)
    if as_json:
        style.print_json(found)
    else:
        print_fields({**found.pop("voice", {}), **found})


def print_fields(fields: Mapping[str, Any]) -> None:
    """Print names and values, a line each, but for what is not said."""
    width = max(map(len, fields), default=0)
    for field, value in fields.items():
        if value in (None, {}, []):
            continue
        shown = time_of(value) if field in _TIMES else _plain(value)
        style.say(f"{field:{width}}  {shown}")


def time_of(seconds: Any) -> str:
    """A time, for people."""
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (TypeError, ValueError, OverflowError, OSError):
        return str(seconds)  # of a server that says something else


def _row(voice: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = voice.get("duration_seconds")
    return (
        str(voice.get("name", "")),
        str(voice.get("id", "")),
        f"{seconds:.1f}" if isinstance(seconds, float | int) else "",
        str(voice.get("language") or ""),
        time_of(voice.get("expires_at")),
        _plain(voice.get("labels") or {}),
    )


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}:{each}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, itertools.islice(value, 100)))
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


COMMANDS = {
    "ls": (
        ls,
        examples(
            "vllm-tts-cache voices ls --label language:de --sort newest --limit 20",
            "vllm-tts-cache voices ls --json | jq -r '.voices[].name'",
            "vllm-tts-cache voices ls --directory ~/.cache/vllm-omni/speakers",
        ),
    ),
    "show": (
        show,
        examples(
            "vllm-tts-cache voices show keeper",
            "vllm-tts-cache voices show keeper --json | jq -r .cache_status",
        ),
    ),
}
