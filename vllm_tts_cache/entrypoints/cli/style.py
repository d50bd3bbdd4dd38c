"""What all commands share: how they are made, fail, and print."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from vllm_tts_cache.printable import printable

FAILED, WRONG, UNREACHABLE, NOT_FOUND, INTERRUPTED = 1, 2, 3, 4, 130

STATUSES = """\
\b
Exit status:
  0    done
  1    it failed, or some of it did
  2    the command line, a setting or a manifest is wrong; nothing was done
  3    the server does not answer
  4    there is no such voice
  130  interrupted (Ctrl-C)
"""

Json = Annotated[bool, typer.Option("--json", help="print one JSON document instead")]


def new_app(**options: Any) -> typer.Typer:
    """Return a group of commands in our style: plain help, no coloured tracebacks."""
    return typer.Typer(
        **{
            "add_completion": False,
            "rich_markup_mode": None,
            "pretty_exceptions_enable": False,
            "no_args_is_help": True,
            "context_settings": {"help_option_names": ["-h", "--help"]},
            **options,
        }
    )


def examples(*lines: str) -> str:
    """Return the end of a help text; the lines are shown as they are."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


def print_json(value: Any) -> None:
    """Print a document.

    In ASCII: half a character, or one that turns a line around, is spelt out.
    """
    sys.stdout.write(f"{json.dumps(value, indent=2)}\n")


def print_columns(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below headings, as wide as they are; nothing is cut off."""
    from rich.cells import cell_len

    lines = [tuple(headings), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, strict=True)
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in cells)
        sys.stdout.write(f"{'  '.join(padded).rstrip()}\n")


def say(text: str) -> None:
    """Print a line of a result."""
    sys.stdout.write(f"{printable(text)}\n")


def note(text: str) -> None:
    """Print a line that is no result."""
    sys.stderr.write(f"{printable(text)}\n")


def complain(error: Exception | str, status: int) -> int:
    """Print a line that says what went wrong."""
    sys.stderr.write(f"vllm-tts-cache: {printable(str(error), 4000)}\n")
    return status


def leave(status: int) -> None:
    """End the command with a status, unless it is 0.

    Raises: typer.Exit.
    """
    if status:
        raise typer.Exit(status)
