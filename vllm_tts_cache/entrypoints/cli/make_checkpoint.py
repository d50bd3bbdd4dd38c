"""``vllm-tts-cache make-checkpoint``: test equipment, random weights."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.testing.encoder_size import ENCODER_SIZES
from vllm_tts_cache.testing.fish_speech import options as fish_speech
from vllm_tts_cache.testing.qwen3_tts import options as qwen3_tts

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
_QWEN3_TTS, _FISH_SPEECH = "qwen3-tts", "fish-speech"


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
    defaults = qwen3_tts.CheckpointOptions()
    add = parser.add_argument
    families = (_QWEN3_TTS, _FISH_SPEECH)
    add("--family", choices=families, default=_QWEN3_TTS, help="(%(default)s)")
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
        f"of {_QWEN3_TTS} only", argument_default=argparse.SUPPRESS
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
    write = {_QWEN3_TTS: _write_qwen3_tts, _FISH_SPEECH: _write_fish_speech}
    with _console.status("starting") as status:
        path = write[arguments.family](
            arguments, lambda step: status.update(f"writing the {step}")
        )
    _console.print(f"Random weights, not a model: {path}", soft_wrap=True)
    return 0


def _write_qwen3_tts(
    arguments: argparse.Namespace, report: Callable[[str], None]
) -> Path:
    from vllm_tts_cache.testing.qwen3_tts.write import write_qwen3_tts_checkpoint

    options = qwen3_tts.CheckpointOptions(
        encoders=arguments.encoders, seed=arguments.seed, **_qwen3_tts_only(arguments)
    )
    return write_qwen3_tts_checkpoint(
        arguments.out, options, force=arguments.force, report=report
    )


def _write_fish_speech(
    arguments: argparse.Namespace, report: Callable[[str], None]
) -> Path:
    from vllm_tts_cache.testing.fish_speech.write import write_fish_speech_checkpoint

    for name in _qwen3_tts_only(arguments):
        raise ConfigError(
            f"--{name.replace('_', '-')} is an option of --family {_QWEN3_TTS} only"
        )
    options = fish_speech.CheckpointOptions(
        encoders=arguments.encoders, seed=arguments.seed
    )
    return write_fish_speech_checkpoint(
        arguments.out, options, force=arguments.force, report=report
    )


def _qwen3_tts_only(arguments: argparse.Namespace) -> dict[str, Any]:
    given = vars(arguments)
    return {name: given[name] for name in ("sensitive", "eos_logit") if name in given}
