"""The command line: ``vllm-tts-cache``.

Each command is a module with ``add_parser(subparsers)`` and ``run(arguments)``.
None imports torch or vLLM before it runs, so that ``--help`` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence

from vllm_tts_cache import __version__
from vllm_tts_cache.entrypoints.cli import (
    demo,
    encode,
    families,
    make_checkpoint,
    serve,
    stage_config,
    verify,
)
from vllm_tts_cache.errors import ConfigError, TTSCacheError

_COMMANDS = (demo, serve, families, encode, verify, make_checkpoint, stage_config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done; 1: it failed; 2: the command line or a setting is wrong.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except ConfigError as exc:
        return _complain(exc, 2)
    except TTSCacheError as exc:
        return _complain(exc, 1)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-tts-cache",
        description="Registered voices and cached reference encodings for vLLM-Omni.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def _complain(exc: TTSCacheError, status: int) -> int:
    print(f"vllm-tts-cache: {exc}", file=sys.stderr)
    return status
