"""``vllm-tts-cache make-checkpoint``: test equipment, random weights."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_tts_cache.entrypoints.cli.style import examples, new_app
from vllm_tts_cache.entrypoints.cli.trial import FamilyName, chosen_family
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.speaker.family import Family, trial_families
from vllm_tts_cache.testing.tiny_checkpoint import (
    EncoderSize,
    TinyCheckpoint,
    TinyWriter,
)

_console = Console(stderr=True)
_OF_ALL = ("encoders", "seed")


def _make(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="absent or empty")
    ],
    family: FamilyName = None,
    encoders: Annotated[
        EncoderSize, typer.Option(help="size of the reference encoders")
    ] = "tiny",
    seed: Annotated[int, typer.Option(help="of all weights")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="replace a checkpoint of this command")
    ] = False,
    **of_families: Any,
) -> None:
    """Write a tiny checkpoint with random weights (test equipment).

    It has the layout of a released one, to start and test a server without a download.
    It is test equipment, not a model: what it speaks is noise, but other noise for
    another voice or another text.
    """
    chosen = chosen_family(family)
    given = {name: value for name, value in of_families.items() if value is not None}
    _refuse_others(chosen, given)
    checkpoint = TinyCheckpoint.of(chosen, encoders=encoders, seed=seed, **given)
    with _console.status("starting") as status:
        path = checkpoint.write(
            out, lambda step: status.update(f"writing the {step}"), force=force
        )
    _console.print(f"Random weights, not a model: {path}", soft_wrap=True)


def _options(family: Family) -> Iterator[inspect.Parameter]:
    """What only this family's checkpoints can be asked for.

    None unless given, so that another family can say that it has no such option.
    """
    for field in _own_fields(family):
        flag = f"--{field.name.replace('_', '-')}"
        text = f"of {family.short_name} only: {field.metadata['help']}"
        kind = type(field.default)
        if kind is bool:
            flag = f"{flag}/--no-{flag[2:]}"
        option = typer.Option(
            flag,
            metavar=None if kind is bool else "X",
            help=f"{text} (default: {field.default})",
        )
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )


def _with_options_of_families() -> Callable[..., None]:
    """The command as Typer reads it: an option is a parameter."""
    signature = inspect.signature(_make)
    fixed = list(signature.parameters.values())[:-1]
    families = dict.fromkeys(trial_families().values())
    own = [option for family in families for option in _options(family)]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fixed]

    @functools.wraps(_make)
    def make_checkpoint(**given: Any) -> None:
        _make(**given)

    shown: Any = make_checkpoint
    shown.__signature__ = signature.replace(parameters=[*parameters, *own])
    return make_checkpoint


def _own_fields(family: Family) -> list["dataclasses.Field[Any]"]:
    writer: TinyWriter = family.part("tiny_part")
    return [f for f in dataclasses.fields(writer.options) if f.name not in _OF_ALL]


def _refuse_others(family: Family, given: Iterable[str]) -> None:
    own = {field.name for field in _own_fields(family)}
    for other in trial_families().values():
        for field in _own_fields(other):
            if field.name in given and field.name not in own:
                name = field.name.replace("_", "-")
                raise ConfigError(
                    f"--{name} is an option of --family {other.short_name} only"
                )


app = new_app()
app.command(
    "make-checkpoint",
    epilog=examples(
        "vllm-tts-cache make-checkpoint --out ./tiny",
        "vllm serve ./tiny --omni",
        "# encoding a reference costs what it does in production",
        "vllm-tts-cache make-checkpoint --out ./real-encoders --encoders real",
        "# another family",
        f"vllm-tts-cache make-checkpoint --family {min(trial_families())} --out ./it",
    ),
)(_with_options_of_families())
