"""``vllm-tts-cache serve``, ``demo`` and ``make-checkpoint``: a try on the CPU."""

import hashlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from vllm_tts_cache.config import expanded, load_settings
from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.errors import ConfigError, ServerFaultError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.speaker.family import (
    CLONE_MODE,
    CloneFacts,
    Family,
    default_family,
    trial_families,
)
from vllm_tts_cache.testing.clips import SPEECH
from vllm_tts_cache.testing.server import (
    HOST,
    Server,
    ServerOptions,
    Speech,
    SpeechClient,
    data_url,
)
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

VOICE = "keeper"
SECOND_VOICE = "keeper again"

serve_app = common.new_app()
make_checkpoint_app = common.new_app()
demo_app = common.new_app()


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
    checkpoint, path = TinyCheckpoint(family), work / f"tiny-{family.name}"
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
    epilog=common.examples(
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
    epilog=common.examples(
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
    checkpoint = TinyCheckpoint(chosen_family(family), encoders=encoders, seed=seed)
    console = Console(stderr=True)
    with console.status("starting") as status:
        path = checkpoint.write(
            out, lambda step: status.update(f"writing the {step}"), force=force
        )
    console.print(f"Random weights, not a model: {path}", soft_wrap=True)


Send = Callable[[SpeechClient], Speech]


@dataclass(frozen=True, slots=True)
class Act:
    """One request, and what must hold of its answer.

    Attributes:
        num_encodes: Encodes by each encoder, since this server's start.
        says: A text that the answer must contain.
        take: Requests with the same take must give the same audio, bit for bit; None
            for a request that asks for no audio.
    """

    label: str
    send: Send
    num_encodes: int = 1
    says: str = ""
    take: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table."""

    act: Act
    answer: Speech
    encodes: dict[str, int]
    problems: list[str]

    @property
    def audio(self) -> bytes:
        """Mono 16-bit samples; empty if the answer holds none."""
        is_audio = self.act.take is not None and self.answer.status == 200
        return self.answer.audio if is_audio else b""


@dataclass(slots=True)
class Story:
    """What has happened so far, and the audio that later answers must equal.

    Attributes:
        starts: For each server, the number of its first outcome.
    """

    encoders: tuple[str, ...]
    starts: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    takes: dict[str, bytes] = field(default_factory=dict)

    def perform(self, act: Act, client: SpeechClient) -> None:
        """Send the request and judge its answer.

        Raises: httpx.HTTPError if the server cannot be reached.
        """
        answer = act.send(client)
        problems = [*self._answer_problems(act, answer)]
        wanted = dict.fromkeys(self.encoders, act.num_encodes)
        for worker in client.stats()["workers"]:
            if worker["encodes"] != wanted:
                problems.append(f"encodes are {worker['encodes']} instead of {wanted}")
            if worker["failed_prompts"]:
                problems.append(f"{worker['failed_prompts']} requests without a prompt")
        self.outcomes.append(Outcome(act, answer, client.encodes(), problems))

    def problems(self) -> list[str]:
        """Return what went wrong, one line each."""
        found = [f"{o.act.label}: {p}" for o in self.outcomes for p in o.problems]
        if len(set(self.takes.values())) < len(self.takes):
            found.append("two modes gave the same audio")
        return found

    def _answer_problems(self, act: Act, answer: Speech) -> Iterator[str]:
        text = answer.audio.decode(errors="replace")
        if answer.status != 200:
            yield f"status {answer.status} instead of 200: {text[:300]}"
        elif act.says not in text:
            yield f"the answer does not say {act.says!r}: {text[:300]}"
        if act.take is None:
            return
        if answer.cache != "hit":
            yield f"X-Speaker-Cache is {answer.cache!r} instead of 'hit'"
        if answer.status != 200:
            return
        if not answer.audio or len(answer.audio) % 2:
            yield f"{len(answer.audio)} bytes are not 16-bit audio"
        elif self.takes.setdefault(act.take, answer.audio) != answer.audio:
            yield f"the audio differs from the first {act.take} one"


def _register(name: str) -> Send:
    text = SPEECH.transcript
    return lambda client: _of_json(client.register(name, SPEECH.path, ref_text=text))


def _precompute(client: SpeechClient) -> Speech:
    return _of_json(client.precompute(VOICE))


def _of_json(response: httpx.Response) -> Speech:
    code, content = response.status_code, response.content
    return Speech(status=code, audio=content, cache=None, ttfa_seconds=0.0)


def _speak(**fields: Any) -> Send:
    text = "The tide is out, and the boats lie on the sand."
    return lambda client: client.speak(text, **fields)


def acts_of(family: Family) -> tuple[tuple[Act, ...], tuple[Act, ...]]:
    """Return the acts for the first and for the second server.

    The voice speaks in the usual mode of a voice with a transcript, and then in every
    other mode of the family.
    """
    usual = family.mode(CloneFacts(stored_transcript=True))
    speak = _speak(voice=VOICE)
    inline = _speak(
        ref_audio=data_url(SPEECH.path),
        ref_text=SPEECH.transcript,
        extra_params={CLONE_MODE: usual.name},
    )
    others = {
        mode.name: _speak(
            voice=VOICE, extra_params={CLONE_MODE: mode.name}, **mode.example
        )
        for mode in family.modes
        if mode is not usual
    }
    first = (
        Act("register the voice", _register(VOICE), 0),
        Act("precompute it", _precompute, says='"ready"'),
        Act("precompute it again", _precompute, says="already exists"),
        Act("speak, first time", speak, take=usual.name),
        Act("speak, warm", speak, take=usual.name),
        Act("second name, same clip", _register(SECOND_VOICE)),
        Act("speak, second name", _speak(voice=SECOND_VOICE), take=usual.name),
        Act("speak, clip inline", inline, take=usual.name),
        *(Act(f"speak, {name}", send, take=name) for name, send in others.items()),
    )
    second = (
        Act("speak after restart", speak, 0, take=usual.name),
        Act("inline after restart", inline, 0, take=usual.name),
        *(
            Act(f"{name} after restart", send, 0, take=name)
            for name, send in others.items()
        ),
    )
    return first, second


@demo_app.command(
    epilog=common.examples("vllm-tts-cache demo", "vllm-tts-cache demo --json")
)
def demo(
    family: FamilyName = None,
    work: Annotated[
        Path,
        typer.Option(metavar="DIR", help="for the checkpoint, voices, logs and audio"),
    ] = Path(".work/demo"),
    as_json: common.Json = False,
) -> None:
    """Register, precompute, speak, restart, speak again, on the CPU.

    Writes a tiny checkpoint with random weights and serves it. Ends with status 0 only
    if the reference audio was encoded once in all and equal requests gave equal audio.
    """
    work = own(work)
    chosen = chosen_family(family)
    _end_by_exception()
    progress = Console(stderr=True)
    story = Story(encoders=chosen.encoders)
    model = tiny_checkpoint(work, chosen, progress)
    samples_dir = emptied(work / "speakers")
    logs = emptied(work / "logs")
    with progress.status("starting") as status:
        for number, acts in enumerate(acts_of(chosen), start=1):
            options = ServerOptions(
                model=model,
                samples_dir=samples_dir,
                log_path=logs / f"server-{number}.log",
                arguments=serve_arguments(chosen),
            )
            _play(options, acts, story, status)
    folder = _save_audio(work, story.outcomes, chosen.sample_rate_hz)
    problems = story.problems()
    if as_json:
        common.print_json({"problems": problems, "audio": str(folder)})
    else:
        console = Console(width=None if sys.stdout.isatty() else 88)
        console.print(_table(story))
        console.print(f"audio: {folder}", soft_wrap=True)
        _print_verdict(console, problems, work)
    common.leave(common.FAILED if problems else 0)


def _play(
    options: ServerOptions, acts: Sequence[Act], story: Story, status: Status
) -> None:
    story.starts.append(len(story.outcomes))
    server, began = Server(options), time.monotonic()
    log = options.log_path
    try:
        server.start(
            lambda s: status.update(f"starting the server: {s:.0f} s (log: {log})")
        )
        seconds = time.monotonic() - began
        status.console.print(f"server started in {seconds:.0f} s: {server.url}")
        with closing(SpeechClient(server.url)) as client:
            for act in acts:
                status.update(act.label)
                story.perform(act, client)
    except httpx.HTTPError as exc:
        raise ServerFaultError(f"The server failed ({exc}); see {log}") from exc
    finally:
        status.update("stopping the server")
        server.stop()


def _table(story: Story) -> Table:
    encoders = "/".join(story.encoders)
    caption = f"encodes: {encoders}, since that server's start"
    narrow = (0, 0, 0, 1)  # 80 columns are enough
    table = Table(box=box.SIMPLE_HEAD, padding=narrow, pad_edge=False, caption=caption)
    table.add_column("step", no_wrap=True)
    for heading in ("status", "X-Speaker\n-Cache", "encodes", "TTFA\nms", "bytes"):
        table.add_column(heading, justify="right")
    table.add_column("sha256")
    table.add_column("")
    for number, outcome in enumerate(story.outcomes):
        if number in story.starts:
            table.add_section()
        answer, audio = outcome.answer, outcome.audio
        is_speech = outcome.act.take is not None
        table.add_row(
            outcome.act.label,
            str(answer.status),
            answer.cache or "",
            "/".join(str(outcome.encodes.get(name, 0)) for name in story.encoders),
            f"{1000 * answer.ttfa_seconds:.0f}" if is_speech else "",
            str(len(audio)) if audio else "",
            # Enough of the hash to compare by eye.
            hashlib.sha256(audio).hexdigest()[:8] if audio else "",
            "[red]no[/red]" if outcome.problems else "[green]ok[/green]",
        )
    return table


def _save_audio(work: Path, outcomes: Sequence[Outcome], sample_rate_hz: int) -> Path:
    folder = emptied(work / "audio")
    for number, outcome in enumerate(outcomes, start=1):
        if not outcome.audio:
            continue
        slug = re.sub(r"[^a-z0-9]+", "-", outcome.act.label.lower())
        path = folder / f"{number:02d}-{slug}.wav"
        with storage_errors(path), wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(sample_rate_hz)
            file.writeframes(outcome.audio)
    return folder


def _print_verdict(console: Console, problems: Sequence[str], work: Path) -> None:
    if problems:
        console.print("[red]What went wrong:[/red]")
        for problem in problems:
            console.print(f"  {problem}", markup=False, soft_wrap=True)
        console.print(f"Server logs: {work / 'logs'}", soft_wrap=True)
        return
    console.print(
        "[green]All went well:[/green] the clip was encoded once, before the first "
        "speech; no request waited for an encode, before or after the restart; equal "
        "requests gave equal audio, bit for bit, on this processor."
    )


def _end_by_exception() -> None:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, so that the server is stopped."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
