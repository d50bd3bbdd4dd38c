"""``vllm-tts-cache make-checkpoint``: test equipment, random weights."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.testing.encoder_size import ENCODER_SIZES
from vllm_tts_cache.testing.families import (
    FAMILIES,
    FISH_SPEECH,
    QWEN3_TTS,
    ServedFamily,
)
from vllm_tts_cache.testing.qwen3_tts.options import CheckpointOptions

_console = Console(stderr=True)

_DESCRIPTION = """\
Write a tiny checkpoint with random weights in the layout of a released one, to
start and test a server without a download. It is test equipment, not a model: what
it speaks is noise, but other noise for another voice or another text.
"""
_EXAMPLES = """\
examples:
  vllm-tts-cache make-checkpoint --out ./tiny-qwen3-tts
  vllm serve ./tiny-qwen3-tts --omni

  # encoding a reference costs what it does in production
  vllm-tts-cache make-checkpoint --out ./real-encoders --encoders real

  # Fish Speech; its slow AR and its codec are tiny
  vllm-tts-cache make-checkpoint --family fish-speech --out ./tiny-fish-speech
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the command; ``run`` is what the arguments are handed to."""
    parser = subparsers.add_parser(
        "make-checkpoint",
        help="write a tiny checkpoint with random weights (test equipment)",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = CheckpointOptions()
    add = parser.add_argument
    families = (QWEN3_TTS.name, FISH_SPEECH.name)
    add("--family", choices=families, default=QWEN3_TTS.name, help="(%(default)s)")
    add("--out", type=Path, required=True, metavar="DIR", help="absent or empty")
    add(
        "--encoders",
        choices=ENCODER_SIZES,
        default=defaults.encoders,
        help="size of the reference encoders (%(default)s)",
    )
    add("--seed", type=int, default=defaults.seed, help="of all weights (%(default)s)")
    add("--force", action="store_true", help="replace a checkpoint of this command")
    # Absent unless given, so that another family can say that it has no such option.
    only = parser.add_argument_group(
        f"of {QWEN3_TTS.name} only", argument_default=argparse.SUPPRESS
    )
    only.add_argument(
        "--sensitive",
        action=argparse.BooleanOptionalAction,
        help="weights under which speakers, attention windows and dtypes are heard "
        "(default: yes)",
    )
    only.add_argument(
        "--eos-logit",
        type=float,
        metavar="X",
        help="mean logit of the end of speech once the text is over; more is shorter "
        f"({defaults.eos_logit})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint.

    Raises:
        ConfigError: The directory must not be overwritten, or an option is wrong.
        StorageError: The checkpoint cannot be written.
    """
    family = FAMILIES[arguments.family]
    family = dataclasses.replace(family, options=_options(arguments, family))
    with _console.status("starting") as status:
        path = family.write_checkpoint(
            arguments.out,
            lambda step: status.update(f"writing the {step}"),
            force=arguments.force,
        )
    _console.print(f"Random weights, not a model: {path}", soft_wrap=True)
    return 0


def _options(arguments: argparse.Namespace, family: ServedFamily) -> Any:
    given = vars(arguments)
    only = {name: given[name] for name in ("sensitive", "eos_logit") if name in given}
    if only and family is not QWEN3_TTS:
        name = next(iter(only)).replace("_", "-")
        raise ConfigError(f"--{name} is an option of --family {QWEN3_TTS.name} only")
    return dataclasses.replace(
        family.options, encoders=arguments.encoders, seed=arguments.seed, **only
    )
