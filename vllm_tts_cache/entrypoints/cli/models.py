"""``vllm-tts-cache families`` and ``stage-config``: which models clone voices, and how.

And where our deploy files are.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_tts_cache.entrypoints.cli.common import (
    Json,
    examples,
    new_app,
    print_json,
)
from vllm_tts_cache.speaker.family import ClipLimits, Family, Mode, families
from vllm_tts_cache.stage_configs import FOLDER

_HEADINGS = (
    "model",
    "commands",
    "modes",
    "encodings",
    "clips",
    "equal to",
    "one KV prefix per voice",
    "on a CPU",
    "never run",
)
families_app = new_app()

stage_config_app = new_app()


@families_app.command(
    "families",
    epilog=examples("vllm-tts-cache families", "vllm-tts-cache families --json"),
)
def list_families(
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="as in the README")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the model families and the ways they clone.

    Those that are installed, third parties' included: the modes in which each clones
    and what its encodings are equal to. A request names a mode in
    extra_params.clone_mode; without, the transcript decides.
    """
    rows = [_row(family) for family in families()]
    if as_json:
        named = [dict(zip(_HEADINGS, row, strict=True)) for row in rows]
        print_json({"families": named})
        return
    if as_markdown:
        sys.stdout.write(markdown(rows))
        return
    table = Table(*_HEADINGS)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Return the table as Markdown, a line a row."""
    lines = [_HEADINGS, ["---"] * len(_HEADINGS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(family: Family) -> tuple[str, ...]:
    return (
        family.title,
        ", ".join(family.command_names) if family.tiny_part else "",
        "; ".join(map(_mode, family.modes)) or "none",
        ", ".join(family.encoders),
        _clips(family.limits) if family.modes else "",
        family.official,
        _yes(family.shares_kv) if family.modes else "",
        _yes(family.deploy_file is not None),
        family.never_run,
    )


def _mode(mode: Mode) -> str:
    needs = f"{mode.name} (transcript {mode.transcript.value}"
    return f"{needs}, or an embedding)" if mode.takes_embedding else f"{needs})"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _clips(limits: ClipLimits) -> str:
    parts = []
    if limits.min_sample_rate_hz:
        parts.append(f"from {limits.min_sample_rate_hz} Hz")
    if limits.max_seconds != float("inf"):
        parts.append(f"up to {limits.max_seconds:g} s")
    return ", ".join(parts) or "any"


def _names() -> list[str]:
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.yaml"))


def _known(name: str) -> str:
    if name not in _names():
        raise typer.BadParameter(f"{name!r} is none of {', '.join(_names())}")
    return name


@stage_config_app.command(
    epilog=examples(
        "# one KV prefix per voice: a second text of a voice prefills only that text",
        "vllm serve fishaudio/s2-pro --omni \\",
        '  --deploy-config "$(vllm-tts-cache stage-config fish-speech)"',
    )
)
def stage_config(
    name: Annotated[
        str,
        typer.Argument(
            callback=_known, autocompletion=_names, help=", ".join(_names())
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print the path of a deploy file of ours, for `vllm serve --deploy-config`.

    What each one changes against the host's, and why, is written in it.
    """
    path = FOLDER / f"{name.replace('-', '_')}.yaml"
    if as_json:
        print_json({"path": str(path)})
    else:
        # Alone on its line, so that a shell can take it.
        typer.echo(path)
