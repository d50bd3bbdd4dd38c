"""Many requests to one server: some at a time, patient, and ended by Ctrl-C."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.errors import (
    RouteMissingError,
    ServerAnswerError,
    ServerUnreachableError,
    TTSCacheError,
)

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient

T = TypeVar("T")
R = TypeVar("R")

FAILED, NOT_TRIED = "failed", "not_tried"

# A server that is restarted is back within this; one that is busy is not given up
# before either.
PATIENCE_SECONDS = 120.0
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_PROCESSING = "processing"
# Tries of a connection that breaks: a proxy, or a server that is started again.
_MAX_LOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one of many.

    Attributes:
        name: Of the voice, or of the file.
        outcome: One word; ``failed`` and ``not_tried`` mean the same of all commands.
        error: Why it failed.
        details: What else there is to say, for ``--json``.
    """

    name: str
    outcome: str
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    def plain(self) -> dict[str, Any]:
        """As a JSON object."""
        error = {} if self.error is None else {"error": self.error}
        return {"name": self.name, "outcome": self.outcome, **error, **self.details}


class Stop:
    """Whether to begin nothing more, and why.

    Attributes:
        event: Set from then on.
        is_interrupted: By Ctrl-C.
        error: What the server would say to all the others as well.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.is_interrupted = False
        self.error: TTSCacheError | None = None

    def interrupt(self) -> None:
        """Begin nothing more: somebody said so."""
        self.is_interrupted = True
        self.event.set()

    def give_up(self, error: TTSCacheError) -> None:
        """Begin nothing more: it would fail as this did."""
        self.error = self.error or error
        self.event.set()


class StoppedError(Exception):
    """It was told to stop while it waited."""


def patiently(call: Callable[[], R], stop: Stop) -> R:
    """Call until the server is not busy: as late as it says, and ever later.

    Raises:
        StoppedError: While it waited.
        ServerAnswerError: The server is busy for too long, or answered otherwise.
        ServerUnreachableError: It was lost several times in a row.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    wait, num_lost = _FIRST_WAIT_SECONDS, 0
    while True:
        try:
            return call()
        except ServerUnreachableError:
            num_lost += 1
            if num_lost == _MAX_LOST:
                raise
            pause = wait
        except ServerAnswerError as exc:
            if exc.retry_after_seconds is None:
                raise
            pause = max(wait, exc.retry_after_seconds)
            if time.monotonic() + pause > until:
                raise
        # Whoever was refused at the same time does not come back at the same time.
        if stop.event.wait(pause * random.uniform(1.0, 1.3)):
            raise StoppedError
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def made_in_turn(
    client: "VoicesClient", name: str, stop: Stop, *, force: bool = False
) -> dict[str, Any]:
    """Have a voice encoded as one of many, however long that takes.

    Raises: As `patiently`.
    """
    make = partial(client.precompute, name, force=force, urgent=False)
    while (made := patiently(make, stop)).get("cache_status") == _PROCESSING:
        if stop.event.is_set():
            raise StoppedError
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """What became of all, in the order in which they were given."""

    outcomes: Sequence[Outcome]
    stop: Stop

    @property
    def counts(self) -> dict[str, int]:
        """How many of each outcome there are."""
        counts: dict[str, int] = {}
        for each in self.outcomes:
            counts[each.outcome] = counts.get(each.outcome, 0) + 1
        return counts

    @property
    def status(self) -> int:
        """The exit status."""
        if self.stop.is_interrupted:
            return style.INTERRUPTED
        if isinstance(self.stop.error, ServerUnreachableError):
            return style.UNREACHABLE
        return style.FAILED if self.stop.error or FAILED in self.counts else 0

    def report(
        self,
        key: str,
        *,
        as_json: bool,
        hint: str = "",
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Print the summary, and what failed and why; then leave.

        Args:
            key: What the JSON document calls the list.
            as_json: Whether to print one.
            hint: How to go on if it was cut short.
            more: What stands beside the list in the JSON document.

        Raises: typer.Exit.
        """
        if as_json:
            document = {
                "counts": self.counts,
                "interrupted": self.stop.is_interrupted,
                key: [each.plain() for each in self.outcomes],
                **(more or {}),
            }
            style.print_json(document)
        else:
            self._print()
        if self.stop.error:
            style.complain(self.stop.error, style.FAILED)
        is_lost = isinstance(self.stop.error, ServerUnreachableError)
        if hint and (self.stop.is_interrupted or is_lost):
            style.note(hint)
        style.leave(self.status)

    def _print(self) -> None:
        counts = (f"{n} {word.replace('_', ' ')}" for word, n in self.counts.items())
        style.say(", ".join(counts) or "nothing to do")
        for each in self.outcomes:
            if each.outcome == FAILED:
                row = each.details.get("row")
                place = "" if row is None else f"row {row}, "
                style.say(f"  {place}{each.name}: {each.error}")


def in_parallel(
    items: Sequence[T],
    work: Callable[[T, Stop], Outcome],
    *,
    name: Callable[[T], str],
    title: str,
    num_jobs: int,
    details: Callable[[T], dict[str, Any]] = lambda _: {},
) -> Many:
    """Do ``work`` for each, and go on when one fails.

    Ctrl-C, or a server that is gone, begins no more; what is on its way is waited for.
    """
    stop = Stop()
    each = _Each(work, name, details, stop)
    futures: list[Future[Outcome]] = []
    with (
        _Progress(title, len(items)) as advance,
        ThreadPoolExecutor(num_jobs) as threads,
    ):
        begin = _Threads(threads, num_jobs, advance)
        try:
            for item in items:
                if stop.event.is_set():
                    break
                futures.append(begin.submit(each.do, item))
            wait(futures)
        except KeyboardInterrupt:
            stop.interrupt()
            style.note("interrupted; what is on its way is waited for")
    # The pool is left, and with it all of them have ended.
    outcomes = [future.result() for future in futures]
    outcomes += map(each.not_tried, items[len(outcomes) :])
    return Many(outcomes=outcomes, stop=stop)


class _Each(Generic[T]):
    """What is done for each item, whatever comes of it."""

    def __init__(
        self,
        work: Callable[[T, Stop], Outcome],
        name: Callable[[T], str],
        details: Callable[[T], dict[str, Any]],
        stop: Stop,
    ):
        self._work = work
        self._name = name
        self._details = details
        self._stop = stop

    def do(self, item: T) -> Outcome:
        """Do it, unless nothing more is to be begun."""
        if self._stop.event.is_set():
            return self.not_tried(item)
        try:
            return self._work(item, self._stop)
        except StoppedError:
            return self.not_tried(item)
        except UnicodeError as exc:  # a file's name that this locale cannot write
            return self._outcome(item, FAILED, error=style.unwritable(exc))
        except (TTSCacheError, OSError) as exc:
            if _is_said_to_all(exc):
                self._stop.give_up(exc)
                return self.not_tried(item)
            return self._outcome(item, FAILED, error=str(exc))

    def not_tried(self, item: T) -> Outcome:
        """What there is to say of one that was not begun."""
        return self._outcome(item, NOT_TRIED)

    def _outcome(self, item: T, outcome: str, error: str | None = None) -> Outcome:
        name, details = self._name(item), self._details(item)
        return Outcome(name=name, outcome=outcome, error=error, details=details)


class _Threads:
    """Hands work to threads, and waits for a free one before it takes more."""

    def __init__(
        self, threads: ThreadPoolExecutor, num_jobs: int, done: Callable[[], None]
    ):
        self._threads = threads
        self._free = threading.Semaphore(num_jobs)
        self._done = done

    def submit(self, work: Callable[[T], R], item: T) -> Future[R]:
        self._free.acquire()
        future = self._threads.submit(work, item)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any]) -> None:
        self._free.release()
        self._done()


def _is_said_to_all(error: Exception) -> TypeGuard[TTSCacheError]:
    """Whether the next voice would be told the same."""
    if isinstance(error, ServerAnswerError):
        refused = error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        return refused or isinstance(error, RouteMissingError)
    return isinstance(error, ServerUnreachableError)


class _Progress:
    """A bar on stderr, if that is a terminal."""

    def __init__(self, title: str, total: int):
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
