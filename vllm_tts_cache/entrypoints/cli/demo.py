"""``vllm-tts-cache demo``: the whole promise, shown on a real server, on a CPU."""

import hashlib
import re
import signal
import socket
import sys
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.status import Status

from vllm_tts_cache.entrypoints.cli import trial
from vllm_tts_cache.entrypoints.cli.common import (
    FAILED,
    Json,
    examples,
    leave,
    new_app,
    print_json,
)
from vllm_tts_cache.entrypoints.cli.trial import FamilyName, chosen_family
from vllm_tts_cache.errors import ConfigError, ServerFaultError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.speaker.family import CLONE_MODE, CloneFacts, Family, Mode
from vllm_tts_cache.testing.clips import SPEECH
from vllm_tts_cache.testing.server import SpeechClient, data_url
from vllm_tts_cache.testing.tiny_checkpoint import serve_arguments

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_tts_cache.testing.server import Server, ServerOptions

VOICE = "keeper"
SECOND_VOICE = "keeper again"
TEXT = "The tide is out, and the boats lie on the sand."

_WIDTH = 88  # of the table, where the output is no terminal

demo_app = new_app()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request was answered.

    Attributes:
        body: A JSON answer, or the error of a speech request, as text.
        audio: Mono 16-bit samples; empty if the request asked for none.
    """

    status: int
    body: str = ""
    cache: str | None = None
    ttfa_seconds: float | None = None
    audio: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One request, and what must hold of its answer.

    Attributes:
        num_encodes: By each encoder, since this server's start.
        says: What the answer must contain.
        take: Requests with the same take must be the same audio, bit for bit.
    """

    label: str
    send: Callable[[SpeechClient], Answer]
    num_encodes: int
    says: str = ""
    take: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row of the table."""

    act: Act
    answer: Answer
    encodes: dict[str, int]
    problems: tuple[str, ...]


@dataclass(slots=True)
class Story:
    """What has happened so far, and the audio that later answers must equal.

    Attributes:
        encoders: Of the family that is served.
        starts: Numbers of the outcomes that are the first of a server.
    """

    encoders: tuple[str, ...]
    starts: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    takes: dict[str, bytes] = field(default_factory=dict)

    def begin_server(self) -> None:
        """Note that the next act meets a new server."""
        self.starts.append(len(self.outcomes))

    def perform(self, act: Act, client: SpeechClient) -> Outcome:
        """Send the request and judge its answer.

        Raises: httpx.HTTPError if the server cannot be reached.
        """
        answer = act.send(client)
        workers = client.stats()["workers"]
        problems = (
            *_problems(act, answer),
            *self._audio_problems(act, answer),
            *_encode_problems(act, self.encoders, workers),
        )
        outcome = Outcome(
            act=act, answer=answer, encodes=client.encodes(), problems=problems
        )
        self.outcomes.append(outcome)
        return outcome

    def problems(self) -> list[str]:
        """Everything that did not hold, one line each."""
        found = [f"{o.act.label}: {p}" for o in self.outcomes for p in o.problems]
        if len(set(self.takes.values())) < len(self.takes):
            found.append("two modes are the same audio")
        return found

    def _audio_problems(self, act: Act, answer: Answer) -> list[str]:
        if act.take is None or answer.status != 200:
            return []
        if not answer.audio or len(answer.audio) % 2:
            return [f"{len(answer.audio)} bytes are not 16-bit audio"]
        if self.takes.setdefault(act.take, answer.audio) != answer.audio:
            return [f"the audio differs from the first {act.take} one"]
        return []


def sha256_prefix(audio: bytes) -> str:
    """Enough of the hash to compare by eye."""
    return hashlib.sha256(audio).hexdigest()[:8]


def _problems(act: Act, answer: Answer) -> list[str]:
    problems = []
    if answer.status != 200:
        problems.append(f"status {answer.status} instead of 200: {answer.body[:300]}")
    elif act.says not in answer.body:
        problems.append(f"the answer does not say {act.says!r}: {answer.body[:300]}")
    if act.take is not None and answer.cache != "hit":
        problems.append(f"X-Speaker-Cache is {answer.cache!r} instead of 'hit'")
    return problems


def _encode_problems(
    act: Act, encoders: tuple[str, ...], workers: list[dict[str, object]]
) -> list[str]:
    problems = []
    wanted = dict.fromkeys(encoders, act.num_encodes)
    for worker in workers:
        if worker["encodes"] != wanted:
            problems.append(f"encodes are {worker['encodes']} instead of {wanted}")
        if worker["failed_prompts"]:
            problems.append(f"{worker['failed_prompts']} requests without a prompt")
    return problems


def _register(name: str) -> Callable[[SpeechClient], Answer]:
    def send(client: SpeechClient) -> Answer:
        fields = {"ref_text": SPEECH.transcript, "precompute": "false"}
        return _json(client.register(name, SPEECH.path, **fields))

    return send


def _speak(**fields: object) -> Callable[[SpeechClient], Answer]:
    def send(client: SpeechClient) -> Answer:
        speech = client.speak(TEXT, **fields)
        is_audio = speech.status == 200
        return Answer(
            status=speech.status,
            body="" if is_audio else speech.audio.decode(errors="replace"),
            cache=speech.cache,
            ttfa_seconds=speech.ttfa_seconds,
            audio=speech.audio if is_audio else b"",
        )

    return send


def _json(response: httpx.Response) -> Answer:
    return Answer(status=response.status_code, body=response.text)


def _precompute(client: SpeechClient) -> Answer:
    return _json(client.precompute(VOICE))


def acts_of(family: Family) -> tuple[tuple[Act, ...], tuple[Act, ...]]:
    """Return what the first and the second server are asked.

    The voice speaks in the mode that a voice with a transcript has, and then in every
    other one of the family.
    """
    usual = family.mode(CloneFacts(stored_transcript=True))
    others = [mode for mode in family.modes if mode is not usual]
    speak = _speak(voice=VOICE)
    inline = _speak(
        ref_audio=data_url(SPEECH.path),
        ref_text=SPEECH.transcript,
        extra_params={CLONE_MODE: usual.name},
    )

    def act(label: str, send: Callable[[SpeechClient], Answer], **more: Any) -> Act:
        return Act(label=label, send=send, num_encodes=1, **more)

    first = (
        Act(label="register the voice", send=_register(VOICE), num_encodes=0),
        act("precompute it", _precompute, says='"ready"'),
        act("precompute it again", _precompute, says="already exists"),
        act("speak, first time", speak, take=usual.name),
        act("speak, warm", speak, take=usual.name),
        act("second name, same clip", _register(SECOND_VOICE)),
        act("speak, second name", _speak(voice=SECOND_VOICE), take=usual.name),
        act("speak, clip inline", inline, take=usual.name),
        *(act(f"speak, {m.name}", _speak_in(m), take=m.name) for m in others),
    )
    second = (
        Act(label="speak after restart", send=speak, num_encodes=0, take=usual.name),
        Act(label="inline after restart", send=inline, num_encodes=0, take=usual.name),
        *(
            Act(
                label=f"{mode.name} after restart",
                send=_speak_in(mode),
                num_encodes=0,
                take=mode.name,
            )
            for mode in others
        ),
    )
    return first, second


def _speak_in(mode: Mode) -> Callable[[SpeechClient], Answer]:
    named = {CLONE_MODE: mode.name}
    return _speak(voice=VOICE, extra_params=named, **mode.example)


@demo_app.command(epilog=examples("vllm-tts-cache demo", "vllm-tts-cache demo --json"))
def demo(
    family: FamilyName = None,
    work: Annotated[
        Path,
        typer.Option(metavar="DIR", help="for the checkpoint, voices, logs and audio"),
    ] = Path(".work/demo"),
    port: Annotated[int | None, typer.Option(help="(default: a free one)")] = None,
    as_json: Json = False,
) -> None:
    """Register, precompute, speak, restart, speak again, on the CPU.

    Writes a tiny checkpoint with random weights and serves it. Ends with status 0 only
    if the reference audio was encoded once in all and equal requests gave equal audio.
    """
    if port is not None:
        _check_unused(port)
    work = trial.own(work)
    chosen = chosen_family(family)
    _end_by_exception()
    progress = Console(stderr=True)
    with progress.status("starting") as status:
        model = trial.tiny_checkpoint(
            work, chosen, lambda step: status.update(f"writing the {step}")
        )
        progress.print(f"checkpoint (random weights, not a model): {model}")
        story = _tell(work, chosen, model, port, status)
    folder = _save_audio(work, story.outcomes, chosen.sample_rate_hz)
    if as_json:
        print_json({"problems": story.problems(), "audio": str(folder)})
        leave(FAILED if story.problems() else 0)
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(_table(story))
    console.print(f"audio: {folder}", soft_wrap=True)
    leave(_verdict(console, story, work))


def _tell(
    work: Path, family: Family, model: Path, port: int | None, status: Status
) -> "Story":
    from vllm_tts_cache.testing.server import ServerOptions

    samples_dir = trial.emptied(work / "speakers")
    logs = trial.emptied(work / "logs")
    story = Story(encoders=family.encoders)
    for number, acts in enumerate(acts_of(family), start=1):
        options = ServerOptions(
            model=model,
            samples_dir=samples_dir,
            log_path=logs / f"server-{number}.log",
            port=port,
            arguments=serve_arguments(family),
        )
        story.begin_server()
        _play(options, acts, story, status)
    return story


def _play(
    options: "ServerOptions", acts: "Sequence[Act]", story: "Story", status: Status
) -> None:
    import httpx

    from vllm_tts_cache.testing.server import SpeechClient

    with _serving(options, status) as server:
        client = SpeechClient(server.url)
        try:
            for act in acts:
                status.update(act.label)
                story.perform(act, client)
        except httpx.HTTPError as exc:
            raise ServerFaultError(
                f"The server failed ({exc}); see {options.log_path}"
            ) from exc
        finally:
            client.close()
            status.update("stopping the server")


@contextmanager
def _serving(options: "ServerOptions", status: Status) -> "Iterator[Server]":
    """A server that is stopped whatever happens, a start cut short included."""
    from vllm_tts_cache.testing.server import Server

    server = Server(options)
    passed = [0.0]

    def report(seconds: float) -> None:
        passed[0] = seconds
        status.update(f"starting the server: {seconds:.0f} s (log: {options.log_path})")

    try:
        server.start(report)
        status.console.print(f"server started in {passed[0]:.0f} s: {server.url}")
        yield server
    finally:
        try:
            server.stop()
        except (KeyboardInterrupt, SystemExit):  # impatience: Ctrl-C while it stops
            server.kill()
            raise


def _table(story: "Story") -> "Table":
    from rich import box
    from rich.table import Table

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
        table.add_row(*_cells(outcome, story.encoders))
    return table


def _cells(outcome: "Outcome", encoders: "Sequence[str]") -> list[str]:

    answer = outcome.answer
    ttfa = answer.ttfa_seconds
    return [
        outcome.act.label,
        str(answer.status),
        answer.cache or "",
        "/".join(str(outcome.encodes.get(name, 0)) for name in encoders),
        "" if ttfa is None else f"{1000 * ttfa:.0f}",
        str(len(answer.audio)) if answer.audio else "",
        sha256_prefix(answer.audio) if answer.audio else "",
        "[red]no[/red]" if outcome.problems else "[green]ok[/green]",
    ]


def _save_audio(work: Path, outcomes: "Sequence[Outcome]", sample_rate_hz: int) -> Path:
    folder = trial.emptied(work / "audio")
    for number, outcome in enumerate(outcomes, start=1):
        if not outcome.answer.audio:
            continue
        slug = re.sub(r"[^a-z0-9]+", "-", outcome.act.label.lower())
        path = folder / f"{number:02d}-{slug}.wav"
        with storage_errors(path), wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(sample_rate_hz)
            file.writeframes(outcome.answer.audio)
    return folder


def _verdict(console: Console, story: "Story", work: Path) -> int:
    if problems := story.problems():
        console.print("[red]What did not hold:[/red]")
        for problem in problems:
            console.print(f"  {problem}", markup=False, soft_wrap=True)
        console.print(f"Server logs: {work / 'logs'}", soft_wrap=True)
        return 1
    console.print(
        "[green]All of it held:[/green] the clip was encoded once, before anybody "
        "spoke; no request waited for it, not after the restart either; equal "
        "requests gave equal audio, bit for bit, on this processor."
    )
    return 0


def _check_unused(port: int) -> None:
    """Else whoever serves there would be taken for our server.

    Raises: ConfigError.
    """
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except (OSError, OverflowError):
        return
    raise ConfigError(f"--port {port}: is in use; choose another, or leave it out")


def _end_by_exception() -> None:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, so that the server is stopped."""

    def leave(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
