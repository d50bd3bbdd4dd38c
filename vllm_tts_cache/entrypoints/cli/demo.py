"""``vllm-tts-cache demo``: the whole promise, shown on a real server, on a CPU."""

import re
import signal
import socket
import sys
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.status import Status

from vllm_tts_cache.entrypoints.cli import trial
from vllm_tts_cache.entrypoints.cli.style import (
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
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.testing.tiny_checkpoint import serve_arguments

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_tts_cache.entrypoints.cli.demo_story import Act, Outcome, Story
    from vllm_tts_cache.testing.server import Server, ServerOptions

_WIDTH = 88  # of the table, where the output is no terminal

app = new_app()


@app.command(epilog=examples("vllm-tts-cache demo", "vllm-tts-cache demo --json"))
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
    from vllm_tts_cache.entrypoints.cli.demo_story import Story, acts_of
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

    from vllm_tts_cache.testing.client import SpeechClient

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
    from vllm_tts_cache.entrypoints.cli.demo_story import sha256_prefix

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
