"""``vllm-tts-cache serve``: a server to try things on, on the CPU."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli import trial
from vllm_tts_cache.entrypoints.cli.trial import add_family_option, chosen_family
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.testing.tiny_checkpoint import serve_arguments

_DESCRIPTION = """\
Run `vllm serve` on the CPU with what a small machine needs, by default with a tiny
checkpoint of random weights (it speaks noise). For production this command is not
needed: `vllm serve MODEL --omni` loads vllm-tts-cache by itself.
"""
_EXAMPLES = """\
Try, in another terminal:

  # register a voice; it is precomputed in the background
  curl -s {url}/v1/audio/voices -F name=keeper -F consent=me -F audio_sample=@{clip} \\
    -F ref_text={transcript}

  # precompute it and wait
  curl -s -X POST {url}/v1/audio/voices/keeper/cache

  # speak with it
  curl -s {url}/v1/audio/speech -H 'Content-Type: application/json' -o keeper.wav \\
    -d '{{"model": "{model}", "input": "Hello there.", "voice": "keeper"}}'

  # what is registered, what is cached
  curl -s {url}/v1/audio/voices
  curl -s {url}/v1/audio/speaker_cache
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the command; ``run`` is what the arguments are handed to."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a tiny checkpoint, or your own, on the CPU",
        description=_DESCRIPTION,
    )
    add = parser.add_argument
    add("--port", type=int, default=8091, help="(%(default)s)")
    add_family_option(parser)
    add("--model", type=Path, metavar="DIR", help="a checkpoint of your own")
    add(
        "--samples-dir",
        type=Path,
        metavar="DIR",
        help="where voices are stored (default: SPEAKER_SAMPLES_DIR, else in --work)",
    )
    add(
        "--work",
        type=Path,
        default=Path(".work/serve"),
        metavar="DIR",
        help="for the tiny checkpoint and its voices (%(default)s)",
    )
    add(
        "arguments",
        nargs="*",
        metavar="-- ARGUMENT",
        help="more arguments of `vllm serve`, after --",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Become the server; returns only by raising.

    Raises:
        ConfigError: The model is no directory, or a setting is wrong.
        StorageError: The checkpoint cannot be written.
    """
    from vllm_tts_cache.testing.server import Server, ServerOptions

    load_settings()  # a wrong one is said here in one line, not in a log of hundreds
    console = Console(stderr=True, soft_wrap=True)
    work = trial.own(arguments.work)
    options = ServerOptions(
        model=_model(arguments, work, console),
        samples_dir=_samples_dir(arguments, work),
        log_path=work / "unused.log",
        port=arguments.port,
        arguments=(
            *serve_arguments(chosen_family(arguments)),
            *arguments.arguments,
        ),
    )
    server = Server(options)
    console.print(f"voices: {options.samples_dir}", markup=False)
    console.print(_examples(server.url), markup=False, highlight=False)
    command = server.command()
    console.print(f"$ {shlex.join(command)}", markup=False, highlight=False)
    sys.stdout.flush()
    os.execve(command[0], command, server.environment())


def _model(arguments: argparse.Namespace, work: Path, console: Console) -> Path:
    if arguments.model is not None:
        if not arguments.model.is_dir():
            raise ConfigError(f"--model {arguments.model}: is not a directory")
        return arguments.model.absolute()
    with console.status("starting") as status:
        path = trial.tiny_checkpoint(
            work,
            chosen_family(arguments),
            lambda step: status.update(f"writing the {step}"),
        )
    console.print(f"checkpoint (random weights, not a model): {path}", markup=False)
    return path


def _samples_dir(arguments: argparse.Namespace, work: Path) -> Path:
    if arguments.samples_dir is not None:
        return arguments.samples_dir.expanduser().absolute()
    if os.environ.get("SPEAKER_SAMPLES_DIR", "").strip():
        return load_settings().samples_dir.absolute()
    return work / "speakers"


def _examples(url: str) -> str:
    from vllm_tts_cache.testing.clips import SPEECH
    from vllm_tts_cache.testing.server import MODEL_NAME

    return _EXAMPLES.format(
        url=url,
        clip=shlex.quote(str(SPEECH.path)),
        transcript=shlex.quote(SPEECH.transcript),
        model=MODEL_NAME,
    )
