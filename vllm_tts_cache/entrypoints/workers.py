"""The worker RPC as seen from the API process: every answer is checked."""

from concurrent import futures
from typing import Any, Protocol

from vllm_tts_cache.errors import EncodeError, EncodingCorruptError, WorkerRPCError
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey

TALKER_STAGE = 0
# An RPC returns between two decode steps; a worker that takes this long is stuck.
TIMEOUT_SECONDS = 30.0


class UnsupportedModelError(WorkerRPCError):
    """The model that is served clones no voices, or not through us."""


class EngineClient(Protocol):
    """The part of the host's engine client that we use."""

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


class Workers:
    """The workers of the stage that prefills."""

    def __init__(self, engine_client: EngineClient):
        self._engine_client = engine_client

    async def call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call one of ``model_executor.rpc``; returns each worker's answer.

        Raises:
            UnsupportedModelError: A worker says that it has no speaker side.
            WorkerRPCError: A worker failed, or answered something else.
        """
        try:
            results = await self._engine_client.collective_rpc(
                method, timeout=TIMEOUT_SECONDS, args=args, stage_ids=[TALKER_STAGE]
            )
        except (RuntimeError, TimeoutError, futures.TimeoutError) as exc:
            raise WorkerRPCError(f"{method}: {str(exc) or repr(exc)}") from exc
        return checked_answers(method, results)


def checked_answers(method: str, results: list[Any]) -> list[dict[str, Any]]:
    """Flatten ``[[answer per worker] per replica]``, refusing what is not an answer.

    The host returns a worker's exception as a value (``supported: False``), and a
    stage that cannot be asked as a ``todo``.

    Raises: as `Workers.call`.
    """
    answers: list[dict[str, Any]] = []
    for replica in results:
        if not isinstance(replica, list):
            raise WorkerRPCError(f"{method}: {_reason(replica)}")
        answers.extend(_checked(method, answer) for answer in replica)
    if not answers:
        raise WorkerRPCError(f"{method}: no worker answered")
    return answers


def encoding_of(answers: list[dict[str, Any]], key: EncodingKey) -> Encoding:
    """Return the encoding that any worker answered ``tts_cache_encoding`` with.

    Raises: EncodeError if none has it (any more), or its copy is damaged.
    """
    for answer in answers:
        if (stored := answer["encoding"]) is not None:
            try:
                return serde.decode(stored, key)
            except EncodingCorruptError as exc:
                raise EncodeError(str(exc)) from exc
    raise EncodeError(f"Encoding {key.digest} is not there any more. Try again.")


def _checked(method: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise WorkerRPCError(f"{method}: a worker answered {answer!r}")
    if answer.get("supported") is False or "todo" in answer:
        raise WorkerRPCError(f"{method}: {_reason(answer)}")
    if "unsupported" in answer:
        raise UnsupportedModelError(f"{method}: {answer['unsupported']}")
    if "failed" in answer:
        raise WorkerRPCError(f"{method}: {answer['failed']}")
    return answer


def _reason(answer: Any) -> str:
    if isinstance(answer, dict):
        return str(answer.get("error") or answer.get("todo") or answer)
    return repr(answer)
