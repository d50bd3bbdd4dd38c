"""The worker RPC as its callers see it: typed both ways, every answer checked.

One struct of `speaker.wire` crosses in each direction, as bytes. The host returns a
worker's exception as a value, and a replica or a stage that cannot be asked as a note
to itself; here both become errors. Of several replicas, those that answer do for all.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from vllm_tts_cache.errors import EncodeError, EncodingCorruptError, WorkerRPCError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.store.binding import StoreId
from vllm_tts_cache.store.encoding import Encoding, EncodingKey, encoding_from_bytes

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

METHOD_PREFIX = "tts_cache_"
TALKER_STAGE, DECODER_STAGE = 0, 1
# An RPC returns between two decode steps; a worker that takes this long is stuck.
TIMEOUT_SECONDS = 30.0
# Of one method at once: the host waits for each in a thread, of which it has few.
MAX_CALLS = 2
STATS_SECONDS = 0.5
LOOKS_SECONDS = 0.5

A = TypeVar("A", bound=msgspec.Struct)


class UnsupportedModelError(WorkerRPCError):
    """The model that is served clones no voices, or not through us."""


class WorkerBusyError(WorkerRPCError):
    """No answer came in time: a batch of a diffusion model may take longer."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    retry_after_seconds = 2


class ForeignStoreError(WorkerRPCError):
    """A worker reads another directory than this process writes."""


@dataclass(frozen=True, slots=True)
class Method(Generic[A]):
    """One of ``model_executor.worker_methods``, and what it answers.

    Attributes:
        needs_all: Whether a replica that does not answer is an error although others
            do. Where there is no replica at all there is nothing to be done.
        stage: Whose workers are asked.
        merge: Makes one request of those of callers that ask at once, who then share
            the answer; None where each asks by itself.
        seconds_between: From one such call to the next, who asks meanwhile shares it:
            each takes the worker off decoding.
    """

    name: str
    answer: type[A]
    needs_all: bool = False
    stage: int = TALKER_STAGE
    merge: Callable[[Sequence[Any]], msgspec.Struct | None] | None = None
    seconds_between: float = 0.0


def _any_of_them(calls: Sequence[wire.FailedCall]) -> wire.FailedCall:
    return wire.FailedCall(request_ids=[i for call in calls for i in call.request_ids])


def _all_of_them(calls: Sequence[wire.LookCall]) -> wire.LookCall:
    return wire.LookCall(keys=list({key: None for call in calls for key in call.keys}))


DESCRIBE = Method("tts_cache_describe", wire.Described)
WANT = Method("tts_cache_want", wire.WantAnswer)
LOOK = Method(
    "tts_cache_look",
    wire.LookAnswer,
    merge=_all_of_them,
    seconds_between=LOOKS_SECONDS,
)
ENCODING = Method("tts_cache_encoding", wire.EncodingAnswer)
# Nothing of a deleted voice may be left: that some have deleted it is not enough.
DELETE = Method("tts_cache_delete", wire.Deleted, needs_all=True)
FAILED = Method("tts_cache_failed", wire.FailedPrompts, merge=_any_of_them)
STATS = Method(
    "tts_cache_stats",
    wire.WorkerStats,
    merge=lambda _: None,
    seconds_between=STATS_SECONDS,
)
# Of families whose decoder keeps states of voices.
DELETE_STATES = Method(
    "tts_cache_delete_states", wire.Deleted, needs_all=True, stage=DECODER_STAGE
)
DECODER_STATS = Method(
    "tts_cache_decoder_stats",
    wire.DecoderStats,
    stage=DECODER_STAGE,
    merge=lambda _: None,
    seconds_between=STATS_SECONDS,
)


class AsyncEngine(Protocol):
    """The part of the host's ``AsyncOmni`` that we use.

    Attributes:
        errored: It has ended, and its workers with it.
    """

    errored: bool

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        stage_ids: list[int] | None = None,
    ) -> list[Any]:
        """Call ``method`` on every worker of the stages: a list per replica."""
        ...


class SyncEngine(Protocol):
    """The part of the host's ``Omni`` that we use; the plugin gives it the method."""

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        stage_ids: list[int] | None = None,
    ) -> list[Any]:
        """Call ``method`` on every worker of the stages: a list per replica."""
        ...


@dataclass(frozen=True, slots=True)
class _Shared:
    """A call that has not begun, and what those ask who wait for its answers."""

    requests: list[msgspec.Struct | None]
    answers: "asyncio.Task[list[Any]]"


class AsyncWorkers:
    """The workers of a server's stages, asked from an event loop."""

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_CALLS)
        )
        self._shared: dict[str, _Shared] = {}
        self._began_at: dict[str, float] = {}

    @property
    def have_ended(self) -> bool:
        """Whether there are none any more; nobody starts them again."""
        return self._engine.errored

    async def call(
        self, method: Method[A], request: msgspec.Struct | None = None
    ) -> list[A]:
        """Call a method; returns the answer of each worker of those replicas that do.

        Of one method `MAX_CALLS` run at a time, and the others wait for their turn.
        What a method can `merge` is asked by one call for all who wait for the next; it
        answers what all of them asked.

        Raises:
            UnsupportedModelError: No replica answers: they have no speaker side.
            WorkerRPCError: No replica answers; or one does not, of a method that needs
                all.
        """
        if method.merge is None:
            return await self._ask(method, lambda: request)
        if (shared := self._shared.get(method.name)) is None:
            shared = self._shared[method.name] = self._next(method, method.merge)
        shared.requests.append(request)
        return await asyncio.shield(shared.answers)

    def _next(self, method: Method[Any], merge: Callable[[Any], Any]) -> _Shared:
        requests: list[msgspec.Struct | None] = []

        def merged() -> msgspec.Struct | None:
            del self._shared[method.name]  # who asks from now on wants to know of now
            self._began_at[method.name] = time.monotonic()
            return merge(requests)

        async def ask() -> list[Any]:
            if (began_at := self._began_at.get(method.name)) is not None:
                free_at = began_at + method.seconds_between
                await asyncio.sleep(max(0.0, free_at - time.monotonic()))
            return await self._ask(method, merged)

        answers = asyncio.create_task(ask())
        answers.add_done_callback(_retrieve)
        return _Shared(requests, answers)

    async def _ask(
        self, method: Method[A], request: Callable[[], msgspec.Struct | None]
    ) -> list[A]:
        turn = self._turns[method.name]
        await turn.acquire()
        # It keeps its turn to its end, although its caller leaves: the host's thread
        # goes on waiting for the worker.
        asked = asyncio.create_task(self._results(method, request))
        asked.add_done_callback(lambda _: turn.release())
        asked.add_done_callback(_retrieve)
        try:
            results = await asyncio.shield(asked)
        except (TimeoutError, futures.TimeoutError) as exc:
            raise WorkerBusyError(f"{method.name}: {str(exc) or repr(exc)}") from exc
        except RuntimeError as exc:
            raise _unreachable(method, exc) from exc
        return checked_answers(method, results)

    async def _results(
        self, method: Method[Any], request: Callable[[], msgspec.Struct | None]
    ) -> list[Any]:
        return await self._engine.collective_rpc(
            method.name,
            timeout=TIMEOUT_SECONDS,
            args=_arguments(request()),
            stage_ids=[method.stage],
        )


class SyncWorkers:
    """The workers of a job's stages, asked by the job."""

    def __init__(self, engine: SyncEngine):
        self._engine = engine

    def call(self, method: Method[A], request: msgspec.Struct | None = None) -> list[A]:
        """Call a method; returns what `AsyncWorkers.call` does.

        Raises: as `AsyncWorkers.call`.
        """
        try:
            results = self._engine.collective_rpc(
                method.name,
                timeout=TIMEOUT_SECONDS,
                args=_arguments(request),
                stage_ids=[method.stage],
            )
        except (RuntimeError, TimeoutError, futures.TimeoutError) as exc:
            raise _unreachable(method, exc) from exc
        return checked_answers(method, results)


def checked_answers(method: Method[A], results: Sequence[Any]) -> list[A]:
    """Flatten ``[[answer per worker] per replica]``, leaving out what is no answer.

    A replica counts as a whole: its workers are ranks of one model.

    Raises: as `AsyncWorkers.call`.
    """
    answers: list[A] = []
    errors: dict[int, WorkerRPCError] = {}
    for number, replica in enumerate(results):
        try:
            answers += _answers_of(method, replica)
        except WorkerRPCError as exc:
            errors[number] = exc
    if errors and (method.needs_all or not answers):
        raise next(iter(errors.values()))
    if not (answers or (method.needs_all and not results)):
        raise WorkerRPCError(f"{method.name}: no worker answered")
    for number, error in errors.items():
        throttled.warn_of(
            f"replica {number}",
            "Replica %d of %d does not answer; the others do: %s",
            number,
            len(results),
            error,
        )
    return answers


def encoding_of(answers: Sequence[wire.EncodingAnswer], key: EncodingKey) -> Encoding:
    """Return the encoding that any worker answered `ENCODING` with.

    Raises: EncodeError if none has it (any more), or its copy is damaged.
    """
    for answer in answers:
        if answer.encoding is not None:
            try:
                return encoding_from_bytes(answer.encoding, key)
            except EncodingCorruptError as exc:
                raise EncodeError(str(exc)) from exc
    raise EncodeError(f"Encoding {key.digest} is not there any more. Try again.")


def fingerprints_of(answers: Sequence[wire.Described]) -> dict[str, str]:
    """Return encoder name -> fingerprint, of workers that must agree.

    Raises: WorkerRPCError if they do not.
    """
    found = [answer.fingerprints for answer in answers]
    if any(other != found[0] for other in found):
        raise WorkerRPCError("the workers have loaded different encoders")
    return dict(found[0])


def refuse_elsewhere(answers: Sequence[wire.Described], store_id: StoreId) -> None:
    """Refuse workers that read another directory than this process writes.

    Raises: ForeignStoreError that names both directories and the setting.
    """
    for answer in answers:
        there = StoreId(id=answer.store_id, place=answer.store_place)
        if store_id.is_elsewhere(there):
            raise ForeignStoreError(
                f"The worker of rank {answer.rank} keeps speakers in {there.place}, "
                f"which is another directory than this process's, {store_id.place}: it "
                "cannot read the reference audio that is stored here, so no voice can "
                "be cloned. Set SPEAKER_SAMPLES_DIR on both to one directory that both "
                "see."
            )


def _retrieve(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # all who asked may have left


def _arguments(request: msgspec.Struct | None) -> tuple[bytes, ...]:
    return () if request is None else (wire.encode(request),)


def _unreachable(method: Method[Any], exc: BaseException) -> WorkerRPCError:
    return WorkerRPCError(f"{method.name}: {str(exc) or repr(exc)}")


def _answers_of(method: Method[A], replica: Any) -> list[A]:
    if not isinstance(replica, list):
        raise WorkerRPCError(f"{method.name}: {_reason(replica)}")
    return [_checked(method, answer) for answer in replica]


def _checked(method: Method[A], answer: Any) -> A:
    if not isinstance(answer, bytes):
        raise WorkerRPCError(f"{method.name}: {_reason(answer)}")
    try:
        found = wire.decode_answer(method.answer, answer)
    except WorkerRPCError as exc:  # another version of this package, perhaps
        raise WorkerRPCError(f"{method.name}: {exc}") from exc
    if isinstance(found, wire.Unsupported):
        raise UnsupportedModelError(f"{method.name}: {found.reason}")
    if isinstance(found, wire.Failed):
        raise WorkerRPCError(f"{method.name}: {found.reason}")
    return found


def _reason(answer: Any) -> str:
    if isinstance(answer, dict):
        return str(answer.get("error") or answer.get("todo") or answer)
    return f"a worker answered {answer!r}"
