"""``vllm-tts-cache families``: which models clone voices, and how."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from vllm_tts_cache.speaker.family import ClipLimits, Family, families
from vllm_tts_cache.speaker.modes import Mode

_HEADINGS = "family", "commands", "mode", "transcript", "encodings", "embedding", "clip"
_DESCRIPTION = """\
List the model families that are installed, third parties' included, and the modes in
which each clones. A request names a mode in extra_params.clone_mode; without, the
transcript decides.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the command; ``run`` is what the arguments are handed to."""
    parser = subparsers.add_parser(
        "families",
        help="list the model families and the ways they clone",
        description=_DESCRIPTION,
    )
    parser.add_argument("--markdown", action="store_true", help="as in the README")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    rows = [row for family in families() for row in _rows(family)]
    if arguments.markdown:
        sys.stdout.write(markdown(rows))
        return 0
    table = Table(*_HEADINGS)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return 0


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return the table as Markdown, a line a row."""
    lines = [_HEADINGS, ["---"] * len(_HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _rows(family: Family) -> list[tuple[str, ...]]:
    names = ", ".join(family.command_names) if family.tiny_part else ""
    if not family.modes:
        return [(family.title, names, "none", "", "", "", "")]
    return [(family.title, names, *_cells(family, mode)) for mode in family.modes]


def _cells(family: Family, mode: Mode) -> tuple[str, ...]:
    return (
        mode.name,
        mode.transcript.value,
        ", ".join(mode.encoders),
        "yes" if mode.takes_embedding else "no",
        _clip(family.limits),
    )


def _clip(limits: ClipLimits) -> str:
    parts = []
    if limits.min_sample_rate_hz:
        parts.append(f"from {limits.min_sample_rate_hz} Hz")
    if limits.max_seconds != float("inf"):
        parts.append(f"up to {limits.max_seconds:g} s")
    return ", ".join(parts) or "any"
