"""Many requests to one server: some at a time, patient, and ended by Ctrl-C."""

import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from rich import progress
from rich.console import Console

from vllm_tts_cache import errors
from vllm_tts_cache.entrypoints.cli import common

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient

T = TypeVar("T")

FAILED, NOT_TRIED = "failed", "not_tried"

# How long a busy server is asked again; a server that is restarted is back by then.
PATIENCE_SECONDS = 120.0
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
# Tries where the connection breaks, as by a proxy or a server that is restarted.
_MAX_BROKEN = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one of many items, voices or files.

    ``outcome`` is one word; ``failed`` and ``not_tried`` mean the same in all commands.
    ``details`` are further fields for ``--json``.
    """

    name: str
    outcome: str
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    def plain(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        error = {} if self.error is None else {"error": self.error}
        return {"name": self.name, "outcome": self.outcome, **error, **self.details}


class Stop(threading.Event):
    """Is set once no more items are begun.

    Attributes:
        is_interrupted: Whether Ctrl-C set it.
        error: An error that the server would answer to all other items as well.
    """

    is_interrupted = False
    error: errors.TTSCacheError | None = None


class StoppedError(Exception):
    """A `Stop` was set while a call waited for a busy server."""


def patiently(call: Callable[..., T], *args: Any, stop: Stop) -> T:
    """Call until the server is not busy, at growing intervals of at least Retry-After.

    Raises:
        StoppedError: ``stop`` was set while this waited.
        ServerAnswerError: The server is busy for too long, or answers another error.
        ServerUnreachableError: The connection broke `_MAX_BROKEN` times.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    wait, num_broken = _FIRST_WAIT_SECONDS, 0
    while True:
        try:
            return call(*args)
        except errors.ServerUnreachableError:
            num_broken += 1
            if num_broken == _MAX_BROKEN:
                raise
            pause = wait
        except errors.ServerAnswerError as exc:
            if exc.retry_after_seconds is None:
                raise
            pause = max(wait, exc.retry_after_seconds)
            if time.monotonic() + pause > until:
                raise
        # A random pause, so that requests refused together are not repeated together.
        if stop.wait(pause * random.uniform(1.0, 1.3)):
            raise StoppedError
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def written_once(write: Callable[..., T], *args: Any, stop: Stop) -> T:
    """Call a writing method of a client `patiently`, each time with the same key.

    Raises: As `patiently`.
    """
    return patiently(partial(write, key=secrets.token_hex(16)), *args, stop=stop)


def made(
    client: "VoicesClient", name: str, stop: Stop, *, urgent: bool, force: bool = False
) -> dict[str, Any]:
    """Wait until a voice is encoded: at once, or in turn, however long that takes.

    Raises: As `patiently`.
    """
    make = partial(client.precompute, name, force=force, urgent=urgent)
    while (answer := patiently(make, stop=stop)).get("cache_status") == "processing":
        if stop.is_set():
            raise StoppedError
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """The outcomes of all items, in the order of the items."""

    outcomes: Sequence[Outcome]
    stop: Stop

    @property
    def counts(self) -> dict[str, int]:
        """The number of items with each outcome."""
        return dict(Counter(each.outcome for each in self.outcomes))

    @property
    def status(self) -> int:
        """The exit status."""
        if self.stop.is_interrupted:
            return common.INTERRUPTED
        if isinstance(self.stop.error, errors.ServerUnreachableError):
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

        The JSON document has the items as ``key``, and ``more``. ``hint`` says how to
        go on if the command was cut short.

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
        is_lost = isinstance(self.stop.error, errors.ServerUnreachableError)
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
    """Call ``work`` for each item, and go on when one fails; ``str(item)`` names it.

    After Ctrl-C, or if the server is gone, no more items are begun; running ones end.
    """
    stop = Stop()

    def ended(item: T, outcome: str, error: str | None = None) -> Outcome:
        more = details(item)
        return Outcome(str(item), outcome, error=error, details=more)

    def one(item: T) -> Outcome:
        if stop.is_set():
            return ended(item, NOT_TRIED)
        try:
            return work(item, stop)
        except StoppedError:
            return ended(item, NOT_TRIED)
        # UnicodeError: this locale may not be able to write a file's name.
        except (errors.TTSCacheError, OSError, UnicodeError) as exc:
            if not _is_answered_to_all(exc):
                return ended(item, FAILED, common.reason_of(exc))
            stop.error = stop.error or exc
            stop.set()
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
            stop.is_interrupted = True
            stop.set()
            common.note("interrupted; waiting for requests that were sent")
    outcomes = [future.result() for future in futures]
    outcomes += (ended(item, NOT_TRIED) for item in items[len(outcomes) :])
    return Many(outcomes=outcomes, stop=stop)


def _is_answered_to_all(error: Exception) -> TypeGuard[errors.TTSCacheError]:
    """Whether the server would answer the same to the next voice."""
    if isinstance(error, errors.RouteMissingError | errors.ServerUnreachableError):
        return True
    refused = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    return isinstance(error, errors.ServerAnswerError) and error.status in refused


def _progress() -> progress.Progress:
    """Return a bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
