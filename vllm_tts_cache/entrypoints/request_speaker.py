"""The speaker of the request that is being prepared, and what its answer says of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from vllm_tts_cache.entrypoints.ensure import EncodingNeed, Ensurer
from vllm_tts_cache.entrypoints.resolve import Clip

CacheOutcome = Literal["hit", "miss", "none"]

HEADER = "X-Speaker-Cache"


@dataclass(frozen=True, slots=True)
class RequestSpeaker:
    """One request's speaker.

    Attributes:
        clip: Its reference audio; None for a preset or a raw embedding.
        in_context: Whether the mode needs codes and the transcript.
    """

    clip: Clip | None
    in_context: bool

    async def ensure(self, ensurer: Ensurer, encoder_names: tuple[str, ...]) -> None:
        """Wait for the clip's encodings, and report whether they were there.

        Raises: EncodeError, EncodeTimeoutError, WorkerRPCError.
        """
        assert self.clip is not None
        need = EncodingNeed(ref=self.clip.ref, encoder_names=encoder_names)
        report("hit" if await ensurer.ensure(need) else "miss")


@dataclass(slots=True, eq=False)
class Outcomes:
    """What the speakers of one HTTP request (a batch has several) found."""

    seen: list[CacheOutcome] = field(default_factory=list)
    error: Exception | None = None

    def header(self) -> str:
        """``miss`` if any was encoded, ``hit`` if all were there, else ``none``."""
        return min(self.seen, key=["miss", "hit", "none"].index, default="none")


# Context variables, because the host's serving class calls through several layers
# between our two ends, and runs several requests of a batch beside each other.
current_speaker: ContextVar[RequestSpeaker | None] = ContextVar(
    "current_speaker", default=None
)
_outcomes: ContextVar[Outcomes | None] = ContextVar("speaker_outcomes", default=None)


@contextmanager
def observe_outcomes() -> Iterator[Outcomes]:
    """Collect the outcomes of what runs inside; an outer observer is joined."""
    if (outer := _outcomes.get()) is not None:
        yield outer
        return
    outcomes = Outcomes()
    token = _outcomes.set(outcomes)
    try:
        yield outcomes
    finally:
        _outcomes.reset(token)


def report(outcome: CacheOutcome) -> None:
    """Tell whoever observes."""
    if (outcomes := _outcomes.get()) is not None:
        outcomes.seen.append(outcome)


def report_error(error: Exception) -> None:
    """Tell whoever observes why the request failed, before the host rewords it."""
    if (outcomes := _outcomes.get()) is not None:
        outcomes.error = error
