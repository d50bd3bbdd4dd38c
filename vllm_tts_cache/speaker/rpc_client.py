"""The worker RPC as its callers see it: typed both ways, every answer checked.

One struct of `speaker.wire` crosses in each direction, as bytes. The host returns a
worker's exception as a value, and a dict for a replica or stage that it cannot call;
here both become errors. If some replicas answer, that is enough, unless `needs_all`.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from vllm_tts_cache.errors import EncodeError, EncodingCorruptError, WorkerRPCError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.store.encoding import Encoding, EncodingKey, encoding_from_bytes

if TYPE_CHECKING:
    from vllm_tts_cache.store.binding import StoreId

throttled = ThrottledLog()

METHOD_PREFIX = "tts_cache_"
TALKER_STAGE, DECODER_STAGE = 0, 1
# An RPC returns between two decode steps; a worker that takes this long is stuck.
TIMEOUT_SECONDS = 30.0
# Calls of one method at once: the host waits for each in a thread, and has few.
MAX_CALLS = 2
STATS_SECONDS = 0.5
_NOT_OURS = (msgspec.MsgspecError, RecursionError, ValueError)

A = TypeVar("A", bound=msgspec.Struct)


class UnsupportedModelError(WorkerRPCError):
    """The model that is served clones no voices, or not through us."""


class WorkerBusyError(WorkerRPCError, status=503):
    """No answer came in time: a batch of a diffusion model may take longer."""

    retry_after_seconds = 2


class ForeignStoreError(WorkerRPCError):
    """A worker reads another directory than this process writes."""


@dataclass(frozen=True, slots=True)
class Method(Generic[A]):
    """One of ``model_executor.rpc_methods``, and the type of its answer.

    Attributes:
        needs_all: Whether a replica that does not answer is an error although others
            do. No replica at all is no error then.
        stage: The stage whose workers are called.
        merge: Makes one request of those that wait for the next call, whose callers
            share its answers; None if each is a call of its own.
        seconds_between: Seconds from one merged call to the next, as each interrupts
            decoding; requests that come meanwhile share the next one.
    """

    name: str
    answer: type[A]
    needs_all: bool = False
    stage: int = TALKER_STAGE
    merge: Callable[[Sequence[Any]], msgspec.Struct | None] | None = None
    seconds_between: float = 0.0


def _merged_failed_calls(calls: Sequence[wire.FailedCall]) -> wire.FailedCall:
    return wire.FailedCall(request_ids=[i for call in calls for i in call.request_ids])


DESCRIBE = Method("tts_cache_describe", wire.Described, merge=lambda calls: calls[-1])
WANT = Method("tts_cache_want", wire.WantAnswer)
ENCODING = Method("tts_cache_encoding", wire.EncodingAnswer)
# Every replica must delete a voice: that some have is not enough.
DELETE = Method("tts_cache_delete", wire.Deleted, needs_all=True)
FAILED = Method("tts_cache_failed", wire.FailedPrompts, merge=_merged_failed_calls)
STATS = Method(
    "tts_cache_stats",
    wire.WorkerStats,
    merge=lambda _: None,
    seconds_between=STATS_SECONDS,
)
# For families whose decoder keeps states of voices.
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


@dataclass(frozen=True, slots=True)
class _Shared:
    """A merged call that has not begun, and the requests that wait for its answers."""

    requests: list[msgspec.Struct | None]
    answers: "asyncio.Task[list[Any]]"


class AsyncWorkers:
    """The workers of the stages of an ``AsyncOmni``, called from an event loop."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_CALLS)
        )
        self._shared: dict[str, _Shared] = {}
        self._began_at: dict[str, float] = {}

    @property
    def have_ended(self) -> bool:
        """Whether the workers have ended; the host does not start them again."""
        return self._engine.errored

    def call(
        self, method: Method[A], request: msgspec.Struct | None = None
    ) -> Awaitable[list[A]]:
        """Call a method; return the answers of all workers of replicas that answered.

        At most `MAX_CALLS` calls of one method run at a time; the others wait. If the
        method has a `merge`, all requests that wait are merged into the next call, and
        share its answers.

        Raises:
            UnsupportedModelError: No replica answers: they have no speaker side.
            WorkerRPCError: No replica answers; or one does not, of a method that needs
                all.
        """
        if method.merge is None:
            return self._ask(method, [request])
        if (shared := self._shared.get(method.name)) is None:
            requests: list[msgspec.Struct | None] = []
            answers = asyncio.create_task(self._ask(method, requests))
            answers.add_done_callback(_retrieve)
            shared = self._shared[method.name] = _Shared(requests, answers)
        shared.requests.append(request)
        return asyncio.shield(shared.answers)

    async def _ask(
        self, method: Method[A], requests: list[msgspec.Struct | None]
    ) -> list[A]:
        """Call the method in its turn; until then callers add to ``requests``."""
        if (began_at := self._began_at.get(method.name)) is not None:
            free_at = began_at + method.seconds_between
            await asyncio.sleep(max(0.0, free_at - time.monotonic()))
        turn = self._turns[method.name]
        await turn.acquire()
        request = requests[0]
        if method.merge is not None:
            del self._shared[method.name]  # a later request needs a later call
            self._began_at[method.name] = time.monotonic()
            request = method.merge(requests)
        answering = self._engine.collective_rpc(
            method.name,
            timeout=TIMEOUT_SECONDS,
            args=() if request is None else (wire.encode(request),),
            stage_ids=[method.stage],
        )
        asked = asyncio.ensure_future(answering)

        def ended(asked: "asyncio.Future[list[Any]]") -> None:
            turn.release()
            _retrieve(asked)

        try:
            results = await asyncio.shield(asked)
        except TimeoutError as exc:
            raise WorkerBusyError(f"{method.name}: {str(exc) or repr(exc)}") from exc
        except RuntimeError as exc:
            raise _unreachable(method, exc) from exc
        finally:
            if asked.done():
                turn.release()
            else:  # The caller leaves; a thread of the host goes on waiting.
                asked.add_done_callback(ended)
        return checked_answers(method, results)


class SyncWorkers:
    """The workers of the stages of a batch job's ``Omni``, called from its thread."""

    def __init__(self, engine: Any):
        self._engine = engine

    def call(self, method: Method[A], request: msgspec.Struct | None = None) -> list[A]:
        """Call a method; return what `AsyncWorkers.call` returns.

        Raises: as `AsyncWorkers.call`.
        """
        try:
            results = self._engine.collective_rpc(
                method.name,
                timeout=TIMEOUT_SECONDS,
                args=() if request is None else (wire.encode(request),),
                stage_ids=[method.stage],
            )
        except (RuntimeError, TimeoutError) as exc:
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

    Raises: EncodeError if no worker has it (any more), or the answer is damaged.
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

    Raises: WorkerRPCError if they disagree.
    """
    found = [answer.fingerprints for answer in answers]
    if any(other != found[0] for other in found):
        raise WorkerRPCError("the workers have loaded different encoders")
    return dict(found[0])


def refuse_elsewhere(answers: Sequence[wire.Described], store_id: "StoreId") -> None:
    """Refuse workers that read another directory than this process writes.

    Raises: ForeignStoreError that names both directories and the setting.
    """
    for answer in answers:
        # Either has no id if a directory takes none.
        if "" != answer.store_id != store_id.id != "":
            raise ForeignStoreError(
                f"The worker of rank {answer.rank} keeps speakers in "
                f"{answer.store_place}, which is another directory than this "
                f"process's, {store_id.place}: no voice can be cloned. Set "
                "SPEAKER_SAMPLES_DIR to one that both see."
            )


def _retrieve(task: "asyncio.Future[Any]") -> None:
    if not task.cancelled():
        task.exception()  # all callers may have been cancelled


def _unreachable(method: Method[Any], exc: BaseException) -> WorkerRPCError:
    return WorkerRPCError(f"{method.name}: {str(exc) or repr(exc)}")


def _answers_of(method: Method[A], replica: Any) -> list[A]:
    if not isinstance(replica, list):
        raise WorkerRPCError(f"{method.name}: {_reason(replica)}")
    answers: list[A] = []
    for answer in replica:
        if not isinstance(answer, bytes):
            raise WorkerRPCError(f"{method.name}: {_reason(answer)}")
        kinds = method.answer | wire.Unsupported | wire.Failed
        try:
            found = msgspec.msgpack.decode(answer, type=kinds)
        except _NOT_OURS as exc:  # another version of this package, perhaps
            # msgspec quotes what it was sent.
            what = f"not the bytes of {method.answer.__name__}: {str(exc)[:200]}"
            raise WorkerRPCError(f"{method.name}: {what}") from exc
        if isinstance(found, wire.Unsupported):
            raise UnsupportedModelError(f"{method.name}: {found.reason}")
        if isinstance(found, wire.Failed):
            raise WorkerRPCError(f"{method.name}: {found.reason}")
        answers.append(found)
    return answers


def _reason(answer: Any) -> str:
    if isinstance(answer, dict):
        return str(answer.get("error") or answer.get("todo") or answer)
    return f"a worker answered {answer!r}"
