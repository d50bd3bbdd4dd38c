"""``vllm-tts-cache serve`` and ``make-checkpoint``: try the plugin on the CPU."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_tts_cache.config import expanded, load_settings
from vllm_tts_cache.entrypoints.cli.common import examples, new_app
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.speaker.family import Family, default_family, trial_families
from vllm_tts_cache.testing.clips import SPEECH
from vllm_tts_cache.testing.server import HOST, Server, ServerOptions
from vllm_tts_cache.testing.tiny_checkpoint import (
    EncoderSize,
    TinyCheckpoint,
    serve_arguments,
)

_WORK_MARKER = ".vllm-tts-cache-work"

_EXAMPLES = """
{url} is ready. Open {url}/voices in a browser. Or try, in another terminal:

  # register a voice; it is precomputed in the background
  curl -s {url}/v1/audio/voices -F name=keeper -F consent=me -F audio_sample=@{clip} \\
    -F ref_text={transcript}

  # precompute it and wait
  curl -s -X POST {url}/v1/audio/voices/keeper/cache

  # speak with it
  curl -s {url}/v1/audio/speech -H 'Content-Type: application/json' -o keeper.wav \\
    -d '{{"input": "Hello there.", "voice": "keeper"}}'

  # what is registered, what is cached
  curl -s {url}/v1/audio/voices
  curl -s {url}/v1/audio/speaker_cache
"""
# Waits until the server answers, and prints; ends if the server has ended. It forks, as
# its parent becomes the server, which must have no child that it does not know.
_ANNOUNCE = """
import http.client, os, sys, time, urllib.request
if os.fork():
    os._exit(0)
server, url, text = int(sys.argv[1]), *sys.argv[2:]
directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
while True:
    time.sleep(0.5)
    try:
        os.kill(server, 0)
        directly.open(url, timeout=5).close()
    except ProcessLookupError:
        sys.exit()
    except (OSError, http.client.HTTPException):
        continue
    sys.stderr.write(text)
    break
"""

serve_app = new_app()
make_checkpoint_app = new_app()


def own(work: Path) -> Path:
    """Return ``work`` as an absolute path, made if missing.

    Raises:
        ConfigError: The directory is not empty, and no command of ours made it.
        StorageError: The directory cannot be made.
    """
    work = expanded(work).absolute()
    with storage_errors(work):
        if work.exists() and not work.is_dir():
            raise ConfigError(f"--work {work}: is not a directory")
        if work.is_dir() and any(work.iterdir()) and not (work / _WORK_MARKER).exists():
            raise ConfigError(
                f"--work {work}: is not empty and was not made by this command, so "
                "it is left alone; choose another directory"
            )
        work.mkdir(parents=True, exist_ok=True)
        (work / _WORK_MARKER).touch()
    return work


def emptied(directory: Path) -> Path:
    """Make or empty a directory in one of `own`; return it. Raises: StorageError."""
    with storage_errors(directory):
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir()
    return directory


def tiny_checkpoint(work: Path, family: Family, console: Console) -> Path:
    """Return a checkpoint with random weights, written unless it is there already.

    Raises: ConfigError, StorageError.
    """
    checkpoint, path = TinyCheckpoint.of(family), work / f"tiny-{family.name}"
    with console.status("starting") as status:
        checkpoint.ensure(path, lambda step: status.update(f"writing the {step}"))
    console.print(f"checkpoint (random weights, not a model): {path}", markup=False)
    return path


def _known(name: str | None) -> str:
    if name is None:
        return default_family().short_name
    if name not in trial_families():
        known = ", ".join(sorted(trial_families()))
        raise typer.BadParameter(f"{name!r} is none of {known}")
    return name


# Names any family that has a tiny checkpoint.
FamilyName = Annotated[
    str | None,
    typer.Option(
        "--family",
        callback=_known,
        autocompletion=lambda: sorted(trial_families()),
        help="`vllm-tts-cache families` lists them as commands  [default: qwen3]",
    ),
]


def chosen_family(name: str | None) -> Family:
    """Return the family of this name; without one, the default family."""
    return trial_families()[_known(name)]


@serve_app.command(
    epilog=examples(
        "vllm-tts-cache serve",
        "vllm-tts-cache serve --family fish-speech -- --max-num-seqs 2",
    )
)
def serve(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGUMENT", help="more arguments of `vllm serve`, after --"
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="to listen on", min=1, max=65535)] = 8091,
    family: FamilyName = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="a checkpoint of your own")
    ] = None,
    samples_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="where voices are stored (default: SPEAKER_SAMPLES_DIR, else in "
            "--work)",
        ),
    ] = None,
    work: Annotated[
        Path, typer.Option(metavar="DIR", help="for the tiny checkpoint and its voices")
    ] = Path(".work/serve"),
) -> None:
    """Serve a tiny checkpoint, or your own, on the CPU.

    Runs `vllm serve` with what a small machine needs, by default with a tiny checkpoint
    of random weights (it speaks noise). For production this command is not needed:
    `vllm serve MODEL --omni` loads vllm-tts-cache by itself.
    """
    load_settings()  # reports a wrong setting in one line, not in a log of hundreds
    console = Console(stderr=True, soft_wrap=True)
    work = own(work)
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        raise ConfigError(f"--port {port}: another program listens there; take another")
    chosen = chosen_family(family)
    if model is not None and not model.is_dir():
        raise ConfigError(f"--model {model}: is not a directory")
    options = ServerOptions(
        model=model.absolute() if model else tiny_checkpoint(work, chosen, console),
        samples_dir=_samples_dir(samples_dir, work),
        log_path=work / "unused.log",
        port=port,
        arguments=(*serve_arguments(chosen), *(arguments or ())),
    )
    server = Server(options)
    console.print(f"voices: {options.samples_dir}", markup=False)
    command = server.command()
    console.print(f"$ {shlex.join(command)}", markup=False, highlight=False)
    console.print("Starting takes a minute or two; requests to try follow the log.")
    text = _EXAMPLES.format(
        url=server.url,
        clip=shlex.quote(str(SPEECH.path)),
        transcript=shlex.quote(SPEECH.transcript),
    )
    announce(os.getpid(), f"{server.url}/health", text)
    os.execve(command[0], command, server.environment())


def announce(server: int, health_url: str, text: str) -> None:
    """Print a text as soon as a server is healthy, unless its process ends before."""
    script = [sys.executable, "-c", _ANNOUNCE, str(server), health_url, text]
    subprocess.run(script, check=True, stdin=subprocess.DEVNULL)


def _samples_dir(samples_dir: Path | None, work: Path) -> Path:
    if samples_dir is not None:
        return expanded(samples_dir).absolute()
    if os.environ.get("SPEAKER_SAMPLES_DIR", "").strip():
        return load_settings().samples_dir.absolute()
    return work / "speakers"


@make_checkpoint_app.command(
    epilog=examples(
        "vllm-tts-cache make-checkpoint --out ./tiny",
        "vllm serve ./tiny --omni",
        "# encoding a reference costs what it does in production",
        "vllm-tts-cache make-checkpoint --out ./real-encoders --encoders real",
        "# another family",
        f"vllm-tts-cache make-checkpoint --family {min(trial_families())} --out ./it",
    )
)
def make_checkpoint(
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
) -> None:
    """Write a tiny checkpoint with random weights (test equipment).

    It has the layout of a released one, to start and test a server without a download.
    It is test equipment, not a model: what it speaks is noise, but other noise for
    another voice or another text.
    """
    checkpoint = TinyCheckpoint.of(chosen_family(family), encoders=encoders, seed=seed)
    console = Console(stderr=True)
    with console.status("starting") as status:
        path = checkpoint.write(
            out, lambda step: status.update(f"writing the {step}"), force=force
        )
    console.print(f"Random weights, not a model: {path}", soft_wrap=True)
