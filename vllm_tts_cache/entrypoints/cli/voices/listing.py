"""``voices ls`` and ``voices show``."""

import itertools
import time
from collections.abc import Mapping
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
    voices_of,
)

_TIMES = ("created_at", "updated_at", "expires_at")
_HEADINGS = ("NAME", "ID", "SECONDS", "LANGUAGE", "PINNED", "EXPIRES", "LABELS")


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
        "yes" if voice.get("pinned") else "",
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
