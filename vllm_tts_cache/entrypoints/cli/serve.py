"""``vllm-tts-cache serve``: a server to try things on, on the CPU."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli import trial
from vllm_tts_cache.entrypoints.cli.style import examples, new_app
from vllm_tts_cache.entrypoints.cli.trial import FamilyName, chosen_family
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.testing.tiny_checkpoint import serve_arguments

_EXAMPLES = """\
Open {url}/voices in a browser. Or try, in another terminal:

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


app = new_app()


@app.command(
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
    port: Annotated[int, typer.Option(help="to listen on")] = 8091,
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
        Path,
        typer.Option(metavar="DIR", help="for the tiny checkpoint and its voices"),
    ] = Path(".work/serve"),
) -> None:
    """Serve a tiny checkpoint, or your own, on the CPU.

    Runs `vllm serve` with what a small machine needs, by default with a tiny checkpoint
    of random weights (it speaks noise). For production this command is not needed:
    `vllm serve MODEL --omni` loads vllm-tts-cache by itself.
    """
    from vllm_tts_cache.testing.server import Server, ServerOptions

    load_settings()  # a wrong one is said here in one line, not in a log of hundreds
    console = Console(stderr=True, soft_wrap=True)
    work = trial.own(work)
    chosen = chosen_family(family)
    options = ServerOptions(
        model=_model(model, chosen, work, console),
        samples_dir=_samples_dir(samples_dir, work),
        log_path=work / "unused.log",
        port=port,
        arguments=(
            *serve_arguments(chosen),
            *(arguments or ()),
        ),
    )
    server = Server(options)
    console.print(f"voices: {options.samples_dir}", markup=False)
    console.print(_examples(server.url), markup=False, highlight=False)
    command = server.command()
    console.print(f"$ {shlex.join(command)}", markup=False, highlight=False)
    sys.stdout.flush()
    os.execve(command[0], command, server.environment())


def _model(model: Path | None, family: Family, work: Path, console: Console) -> Path:
    if model is not None:
        if not model.is_dir():
            raise ConfigError(f"--model {model}: is not a directory")
        return model.absolute()
    with console.status("starting") as status:
        path = trial.tiny_checkpoint(
            work,
            family,
            lambda step: status.update(f"writing the {step}"),
        )
    console.print(f"checkpoint (random weights, not a model): {path}", markup=False)
    return path


def _samples_dir(samples_dir: Path | None, work: Path) -> Path:
    if samples_dir is not None:
        return samples_dir.expanduser().absolute()
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
