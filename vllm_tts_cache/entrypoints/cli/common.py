"""What commands share: options, exit statuses, printing, errors, and a client."""

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from vllm_tts_cache.config import Settings, expanded, load_settings
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.logs import printable

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient

FAILED, WRONG, UNREACHABLE, NOT_FOUND, INTERRUPTED = 1, 2, 3, 4, 130

STATUSES = """\
\b
Exit status:
  0    done
  1    it failed, or some of it did
  2    the command line, a setting or a manifest is wrong; nothing was done
  3    the server does not answer, or its certificate is not trusted
  4    there is no such voice
  130  interrupted (Ctrl-C)
"""

Sort = Literal["name", "newest", "oldest"]
OnConflict = Literal["fail", "replace", "rename"]
DEFAULT_URL = "http://127.0.0.1:8091"

Json = Annotated[bool, typer.Option("--json", help="print one JSON document instead")]
Url = Annotated[
    str, typer.Option("--url", metavar="URL", envvar="SPEAKER_URL", help="the server")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        # Not OPENAI_API_KEY: on most machines it holds a key of OpenAI's, which would
        # be sent to the server that --url names.
        envvar="VLLM_API_KEY",
        help="as of `vllm serve --api-key`, or a tenant's",
        show_default=False,
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        metavar="DIR",
        help="a SPEAKER_SAMPLES_DIR, not a server; stop its server to write it",
    ),
]
TenantName = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        help="whose voices, with --directory; a server knows it by the key",
        show_default=False,
    ),
]
Jobs = Annotated[
    int, typer.Option("--jobs", min=1, max=32, help="requests at the same time")
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY:VALUE", help="may be repeated"),
]
Description = Annotated[str | None, typer.Option(help="free text")]
Language = Annotated[str | None, typer.Option(help="as de or pt-BR")]
RefText = Annotated[str | None, typer.Option(help="what is said in the clip")]
ExpiresAt = Annotated[
    str | None, typer.Option(help="ISO 8601, or Unix seconds; deleted then")
]
Aliases = Annotated[
    list[str] | None,
    typer.Option("--alias", metavar="NAME", help="another name; may be repeated"),
]
VoiceSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="NAME=VALUE",
        help="how it speaks unless a request says so, as speed=0.9; may be repeated",
    ),
]
Search = Annotated[
    str | None,
    typer.Option(help="part of a name, an alias, a description or a label's value"),
]


class _App(typer.Typer):
    """A group of commands that read their texts as UTF-8."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Add a command."""
        return super().command(name, **{"cls": _Command, **options})


class _Command(TyperCommand):
    """A command that takes texts as UTF-8, also where the locale knows ASCII alone.

    Python hands over bytes that the locale cannot read as halves of characters, which
    no server takes. Paths may hold such halves.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and decode texts. Raises: ConfigError if one is not UTF-8."""
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            if (name := parameter.name) in ctx.params:
                ctx.params[name] = _read(ctx.params[name], parameter)
        return rest


def _read(value: Any, parameter: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_read(each, parameter) for each in value)
    if not isinstance(value, str) or value.isascii():
        return value
    try:
        value.encode()
        return value
    except UnicodeError:
        pass
    try:
        return os.fsencode(value).decode()
    except UnicodeError as exc:
        is_option = parameter.param_type_name == "option"
        name = parameter.metavar or parameter.name.upper()
        what = parameter.opts[0] if is_option else name
        raise ConfigError(f"{what}: it holds bytes that are not UTF-8") from exc


def open_streams() -> bool:
    """Make the streams escape characters that the locale lacks; open missing ones.

    Returns: Whether there was a standard output: a program may be started without one.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        return False
    for stream in (sys.stdout, sys.stderr):
        is_strict = getattr(stream, "errors", "") in ("strict", "surrogateescape")
        if is_strict and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return True


def new_app(*, add_completion: bool = False, **options: Any) -> typer.Typer:
    """Return a group of commands in our style: plain help, no coloured tracebacks."""
    return _App(
        add_completion=add_completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def examples(*lines: str) -> str:
    """Return the end of a help text; the lines are shown as they are."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def print_json(value: Any) -> None:
    """Print a document.

    All but ASCII is escaped, so half a character, or one that reverses a line, is, too.
    """
    sys.stdout.write(f"{json.dumps(value, indent=2)}\n")


def print_columns(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below headings, each column as wide as its widest cell."""
    from rich.cells import cell_len

    lines = [tuple(headings), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, strict=True)
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in cells)
        sys.stdout.write(f"{'  '.join(padded).rstrip()}\n")


def say(text: str) -> None:
    """Print a line of a command's result."""
    sys.stdout.write(f"{printable(text)}\n")


def note(text: str) -> None:
    """Print a line to stderr that is no part of the command's result."""
    sys.stderr.write(f"{printable(text)}\n")


def complain(error: Exception | str, status: int) -> int:
    """Print an error as one line to stderr, and return the exit status."""
    sys.stderr.write(f"vllm-tts-cache: {printable(str(error), 4000)}\n")
    return status


def reason_of(error: Exception) -> str:
    """Return an error's text; for a character that cannot be written, with a hint."""
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":
        return f"{error}; set PYTHONUTF8=1, so that it is written in UTF-8"
    return str(error)


def leave(status: int) -> None:
    """End the command with a status, unless it is 0. Raises: typer.Exit."""
    if status:
        raise typer.Exit(status)


def pairs(labels: list[str] | None) -> dict[str, str]:
    """Parse ``key:value`` texts. Raises: ConfigError."""
    found = [text.partition(":") for text in labels or ()]
    if not all(key.strip() and separator for key, separator, _ in found):
        raise ConfigError("--label: write each label as KEY:VALUE")
    return {key.strip(): value.strip() for key, _, value in found}


def extras_of(aliases: list[str] | None, settings: list[str] | None) -> dict[str, Any]:
    """Return the aliases and settings that are given, by the routes' names of them.

    A setting is JSON, or a text. Raises: ConfigError.
    """
    parsed: dict[str, Any] = {}
    for each in settings or ():
        name, is_pair, value = each.partition("=")
        if not is_pair:
            raise ConfigError(f"--setting {each!r}: write it as NAME=VALUE")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    given = {"aliases": aliases, "settings": parsed}
    return {name: value for name, value in given.items() if value}


def settings_of(directory: Path | None) -> Settings:
    """Return the environment's settings, with ``directory`` if one is given.

    Raises: ConfigError.
    """
    if directory is None:
        return load_settings()
    # Set before the settings are read: a user without a home directory has no default.
    where = str(expanded(directory).absolute())
    return load_settings({**os.environ, "SPEAKER_SAMPLES_DIR": where})


def client_of(url: str, api_key: str | None) -> "VoicesClient":
    """Return a client; nothing is sent yet. Raises: ConfigError."""
    from vllm_tts_cache.client import VoicesClient

    return VoicesClient(url, api_key)
