"""The command line: ``vllm-tts-cache``.

A command's module is imported when the command is called or asked for its help, so that
``--help`` and a shell's completion answer at once.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from vllm_tts_cache import __version__, errors
from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.entrypoints.cli.common import STATUSES, complain, new_app

# name -> (module, text in the list); the module has the command as `<name>_app`.
_COMMANDS = {
    "voices": ("voices", "list, add, check, change, save and try voices"),
    "doctor": ("doctor", "look for what is wrong or slow on this machine"),
    "gc": ("store_commands", "tidy the directory of a stopped server"),
    "verify": ("store_commands", "check the stored voices under SPEAKER_SAMPLES_DIR"),
    "families": ("models", "list the model families and the ways they clone"),
    "encode": ("models", "encode clips into a safetensors file, without a server"),
    "stage-config": ("models", "print the path of a deploy file"),
    "serve": ("trial", "serve a tiny checkpoint, or your own, on the CPU"),
    "demo": ("trial", "register, precompute, speak, restart, speak again, on the CPU"),
    "make-checkpoint": (
        "trial",
        "write a tiny checkpoint with random weights (test equipment)",
    ),
}


class _Commands(TyperGroup):
    """Finds a command by importing its module."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, without importing their modules."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command's module and return the command; None if there is none."""
        del ctx
        if (found := _COMMANDS.get(cmd_name)) is None:
            return None
        module = import_module(f"{__name__}.{found[0]}")
        return get_command(getattr(module, f"{cmd_name.replace('-', '_')}_app"))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, without importing their modules."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


app = new_app(cls=_Commands, add_completion=True, epilog=STATUSES)


def _version(is_asked: bool) -> None:
    if is_asked:
        hosts = [each.version for each in metadata.distributions(name="vllm-omni")]
        typer.echo(f"{__version__} (vllm-omni {', '.join(hosts) or 'not installed'})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="print it"),
    ] = False,
) -> None:
    """Registered voices and cached reference encodings for vLLM-Omni."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, one of `common.STATUSES`.

    A failure of the environment (a disk, a locale, a closed output) prints one line.
    """
    if not common.open_streams():
        return complain("the standard output is closed", common.FAILED)
    try:
        app(None if argv is None else list(argv), prog_name="vllm-tts-cache")
    except SystemExit as exc:
        return _flushed(exc.code if isinstance(exc.code, int) else 0)
    except errors.TTSCacheError as exc:
        its_own = isinstance(exc, errors.StorageError)  # there is no server's log
        return complain(exc.log_text if its_own else exc, _status_of(exc))
    except (OSError, UnicodeError) as exc:
        return complain(common.reason_of(exc), common.FAILED)
    return _flushed(0)


def _flushed(status: int) -> int:
    """Flush the output, as a full disk may show at its end only; return the status."""
    try:
        sys.stdout.flush()
    except OSError as exc:
        # So that Python does not flush the rest again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status or complain(f"the standard output: {exc}", common.FAILED)
    return status


def _status_of(error: errors.TTSCacheError) -> int:
    if isinstance(error, errors.ConfigError):
        return common.WRONG
    if isinstance(error, errors.ServerUnreachableError):
        return common.UNREACHABLE
    is_not_found = isinstance(error, errors.SpeakerNotFoundError | errors.NotThereError)
    return common.NOT_FOUND if is_not_found else common.FAILED
