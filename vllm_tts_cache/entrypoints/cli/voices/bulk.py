"""Many requests to one server: some at a time, patient, and ended by Ctrl-C."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.errors import (
    RouteMissingError,
    ServerAnswerError,
    ServerUnreachableError,
    TTSCacheError,
)

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient

T = TypeVar("T")

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
        """Return it as a JSON object."""
        error = {} if self.error is None else {"error": self.error}
        return {"name": self.name, "outcome": self.outcome, **error, **self.details}


class Stop:
    """Whether to begin nothing more, and why.

    Attributes:
        event: Set from then on.
        is_interrupted: By Ctrl-C.
        error: What the server would answer to all the others as well.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.is_interrupted = False
        self.error: TTSCacheError | None = None

    def interrupt(self) -> None:
        """Begin nothing more: Ctrl-C was pressed."""
        self.is_interrupted = True
        self.event.set()

    def give_up(self, error: TTSCacheError) -> None:
        """Begin nothing more: it would fail as this did."""
        self.error = self.error or error
        self.event.set()


class StoppedError(Exception):
    """A `Stop` was set while a call waited for a busy server."""


def patiently(call: Callable[[], T], stop: Stop) -> T:
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
        # Requests that were refused at one time do not come back at one time.
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
        return dict(Counter(each.outcome for each in self.outcomes))

    @property
    def status(self) -> int:
        """The exit status."""
        if self.stop.is_interrupted:
            return common.INTERRUPTED
        if isinstance(self.stop.error, ServerUnreachableError):
            return common.UNREACHABLE
        return common.FAILED if self.stop.error or FAILED in self.counts else 0

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
            common.print_json(document)
        else:
            self._print()
        if self.stop.error:
            common.complain(self.stop.error, common.FAILED)
        is_lost = isinstance(self.stop.error, ServerUnreachableError)
        if hint and (self.stop.is_interrupted or is_lost):
            common.note(hint)
        common.leave(self.status)

    def _print(self) -> None:
        counts = (f"{n} {word.replace('_', ' ')}" for word, n in self.counts.items())
        common.say(", ".join(counts) or "nothing to do")
        for each in self.outcomes:
            if each.outcome == FAILED:
                row = each.details.get("row")
                place = "" if row is None else f"row {row}, "
                common.say(f"  {place}{each.name}: {each.error}")


def in_parallel(
    items: Sequence[T],
    work: Callable[[T, Stop], Outcome],
    *,
    title: str,
    num_jobs: int,
    details: Callable[[T], dict[str, Any]] = lambda _: {},
) -> Many:
    """Do ``work`` for each, and go on when one fails; its text is its name then.

    Ctrl-C, or a server that is gone, begins no more; what is on its way is waited for.
    """
    stop = Stop()

    def ended(item: T, outcome: str, error: str | None = None) -> Outcome:
        more = details(item)
        return Outcome(name=str(item), outcome=outcome, error=error, details=more)

    def one(item: T) -> Outcome:
        if stop.event.is_set():
            return ended(item, NOT_TRIED)
        try:
            return work(item, stop)
        except StoppedError:
            return ended(item, NOT_TRIED)
        # A file's name may be one that this locale cannot write.
        except (TTSCacheError, OSError, UnicodeError) as exc:
            if not _is_answered_to_all(exc):
                return ended(item, FAILED, common.reason_of(exc))
            stop.give_up(exc)
            return ended(item, NOT_TRIED)

    futures: list[Future[Outcome]] = []
    with _progress() as bar, ThreadPoolExecutor(num_jobs) as threads:
        task = bar.add_task(title, total=len(items))
        try:
            for item in items:
                futures.append(threads.submit(one, item))
            for _ in as_completed(futures):
                bar.advance(task)
        except KeyboardInterrupt:
            stop.interrupt()
            common.note("interrupted; what is on its way is waited for")
    outcomes = [future.result() for future in futures]
    outcomes += (ended(item, NOT_TRIED) for item in items[len(outcomes) :])
    return Many(outcomes=outcomes, stop=stop)


def _is_answered_to_all(error: Exception) -> TypeGuard[TTSCacheError]:
    """Whether the server would answer the same to the next voice."""
    if isinstance(error, RouteMissingError | ServerUnreachableError):
        return True
    refused = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    return isinstance(error, ServerAnswerError) and error.status in refused


def _progress() -> Progress:
    """Return a bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
