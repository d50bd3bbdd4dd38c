"""``vllm-tts-cache make-checkpoint``: test equipment, random weights."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_tts_cache.entrypoints.cli.trial import add_family_option, chosen_family
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.speaker.family import Family, trial_families
from vllm_tts_cache.testing.tiny_checkpoint import (
    ENCODER_SIZES,
    TinyCheckpoint,
    TinyWriter,
)

_console = Console(stderr=True)
_OF_ALL = ("encoders", "seed")

_DESCRIPTION = """\
Write a tiny checkpoint with random weights in the layout of a released one, to
start and test a server without a download. It is test equipment, not a model: what
it speaks is noise, but other noise for another voice or another text.
"""
_EXAMPLES = """\
examples:
  vllm-tts-cache make-checkpoint --out ./tiny
  vllm serve ./tiny --omni

  # encoding a reference costs what it does in production
  vllm-tts-cache make-checkpoint --out ./real-encoders --encoders real

  # another family
  vllm-tts-cache make-checkpoint --family {other} --out ./tiny-{other}
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the command; ``run`` is what the arguments are handed to."""
    parser = subparsers.add_parser(
        "make-checkpoint",
        help="write a tiny checkpoint with random weights (test equipment)",
        description=_DESCRIPTION,
        epilog=_EXAMPLES.format(other=min(trial_families())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_family_option(parser)
    add("--out", type=Path, required=True, metavar="DIR", help="absent or empty")
    add(
        "--encoders",
        choices=ENCODER_SIZES,
        default="tiny",
        help="size of the reference encoders (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of all weights (%(default)s)")
    add("--force", action="store_true", help="replace a checkpoint of this command")
    for family in dict.fromkeys(trial_families().values()):
        _add_options(parser, family)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint.

    Raises:
        ConfigError: The directory must not be overwritten, or an option is wrong.
        StorageError: The checkpoint cannot be written.
    """
    family = chosen_family(arguments)
    checkpoint = TinyCheckpoint.of(family, **_options(arguments, family))
    with _console.status("starting") as status:
        path = checkpoint.write(
            arguments.out,
            lambda step: status.update(f"writing the {step}"),
            force=arguments.force,
        )
    _console.print(f"Random weights, not a model: {path}", soft_wrap=True)
    return 0


def _add_options(parser: argparse.ArgumentParser, family: Family) -> None:
    """Add what only this family's checkpoints can be asked for."""
    if not (fields := _own_fields(family)):
        return
    # Absent unless given, so that another family can say that it has no such option.
    group = parser.add_argument_group(
        f"of {family.short_name} only", argument_default=argparse.SUPPRESS
    )
    for field in fields:
        flag = f"--{field.name.replace('_', '-')}"
        text = f"{field.metadata['help']} (default: {field.default})"
        if isinstance(field.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(flag, type=type(field.default), metavar="X", help=text)


def _own_fields(family: Family) -> list["dataclasses.Field[Any]"]:
    writer: TinyWriter = family.part("tiny_part")
    return [f for f in dataclasses.fields(writer.options) if f.name not in _OF_ALL]


def _options(arguments: argparse.Namespace, family: Family) -> dict[str, Any]:
    given = vars(arguments)
    own = {field.name for field in _own_fields(family)}
    for other in trial_families().values():
        for field in _own_fields(other):
            if field.name in given and field.name not in own:
                name = field.name.replace("_", "-")
                raise ConfigError(
                    f"--{name} is an option of --family {other.short_name} only"
                )
    return {name: given[name] for name in (*_OF_ALL, *own) if name in given}
