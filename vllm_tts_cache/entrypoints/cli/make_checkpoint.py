"""``vllm-tts-cache make-checkpoint``: test equipment, random weights."""

import argparse
from pathlib import Path

from rich.console import Console

from vllm_tts_cache.testing.qwen3_tts.options import ENCODER_SIZES, CheckpointOptions

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
    add("--family", choices=("qwen3-tts",), default="qwen3-tts", help="(%(default)s)")
    add("--out", type=Path, required=True, metavar="DIR", help="absent or empty")
    add(
        "--sensitive",
        action=argparse.BooleanOptionalAction,
        default=defaults.sensitive,
        help="weights under which speakers, attention windows and dtypes are heard "
        "(default: yes)",
    )
    add(
        "--encoders",
        choices=ENCODER_SIZES,
        default=defaults.encoders,
        help="size of the reference encoders (%(default)s)",
    )
    add("--seed", type=int, default=defaults.seed, help="of all weights (%(default)s)")
    add(
        "--eos-logit",
        type=float,
        default=defaults.eos_logit,
        metavar="X",
        help="mean logit of the end of speech once the text is over; more is shorter "
        "(%(default)s)",
    )
    add("--force", action="store_true", help="replace a checkpoint of this command")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint.

    Raises:
        ConfigError: The directory must not be overwritten, or an option is wrong.
        StorageError: The checkpoint cannot be written.
    """
    from vllm_tts_cache.testing.qwen3_tts.write import write_qwen3_tts_checkpoint

    options = CheckpointOptions(
        sensitive=arguments.sensitive,
        encoders=arguments.encoders,
        seed=arguments.seed,
        eos_logit=arguments.eos_logit,
    )
    with _console.status("starting") as status:
        path = write_qwen3_tts_checkpoint(
            arguments.out,
            options,
            force=arguments.force,
            report=lambda step: status.update(f"writing the {step}"),
        )
    _console.print(f"Random weights, not a model: {path}", soft_wrap=True)
    return 0
