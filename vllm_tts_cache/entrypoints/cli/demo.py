"""``vllm-tts-cache demo``: shows on a real server that a clip is encoded once."""

import hashlib
import re
import signal
import sys
import time
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from vllm_tts_cache.entrypoints.cli import common, trial
from vllm_tts_cache.errors import ServerFaultError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.speaker.family import CLONE_MODE, CloneFacts, Family
from vllm_tts_cache.testing import server as servers
from vllm_tts_cache.testing.clips import SPEECH
from vllm_tts_cache.testing.server import Speech, SpeechClient
from vllm_tts_cache.testing.tiny_checkpoint import serve_arguments

VOICE = "keeper"
SECOND_VOICE = "keeper again"
TEXT = "The tide is out, and the boats lie on the sand."

_WIDTH = 88  # of the table, where the output is no terminal

demo_app = common.new_app()

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
    problems: tuple[str, ...]

    @property
    def audio(self) -> bytes:
        """Mono 16-bit samples; empty if the answer holds none."""
        is_audio = self.act.take is not None and self.answer.status == 200
        return self.answer.audio if is_audio else b""


@dataclass(slots=True)
class Story:
    """What has happened so far, and the audio that later answers must equal.

    Attributes:
        encoders: The encoders of the family that is served.
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
        self.outcomes.append(Outcome(act, answer, client.encodes(), tuple(problems)))

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
    return lambda client: client.speak(TEXT, **fields)


def acts_of(family: Family) -> tuple[tuple[Act, ...], tuple[Act, ...]]:
    """Return the acts for the first and for the second server.

    The voice speaks in the usual mode of a voice with a transcript, and then in every
    other mode of the family.
    """
    usual = family.mode(CloneFacts(stored_transcript=True))
    speak = _speak(voice=VOICE)
    inline = _speak(
        ref_audio=servers.data_url(SPEECH.path),
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
    family: trial.FamilyName = None,
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
    work = trial.own(work)
    chosen = trial.chosen_family(family)
    _end_by_exception()
    progress = Console(stderr=True)
    story = Story(encoders=chosen.encoders)
    model = trial.tiny_checkpoint(work, chosen, progress)
    samples_dir = trial.emptied(work / "speakers")
    logs = trial.emptied(work / "logs")
    with progress.status("starting") as status:
        for number, acts in enumerate(acts_of(chosen), start=1):
            options = servers.ServerOptions(
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
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        console.print(_table(story))
        console.print(f"audio: {folder}", soft_wrap=True)
        _print_verdict(console, problems, work)
    common.leave(common.FAILED if problems else 0)


def _play(
    options: servers.ServerOptions, acts: Sequence[Act], story: Story, status: Status
) -> None:
    story.starts.append(len(story.outcomes))
    server, began = servers.Server(options), time.monotonic()
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
    folder = trial.emptied(work / "audio")
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
