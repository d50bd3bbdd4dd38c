"""Which voices the served model clones, how, and the states of its decoders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.errors import SpeakerRequestError
from vllm_tts_cache.speaker.family import Family, clips_problem, possible_modes
from vllm_tts_cache.speaker.reference import EncodingNeed, SpeakerRef
from vllm_tts_cache.speaker.rpc_client import (
    A,
    AsyncWorkers,
    Method,
    UnsupportedModelError,
)
from vllm_tts_cache.speaker.wire import DeleteCall

# Of a voice's encodings, for the model that is served.
CacheState = Literal["pending", "processing", "ready", "failed", "unsupported"]


class Status(NamedTuple):
    """Whether a voice's encodings exist and, of what cannot be ``ready``, why not.

    Attributes:
        num_attempts, next_try: As of `FailedEncode`; None if no encode failed.
    """

    state: CacheState
    error: str | None = None
    num_attempts: int | None = None
    next_try: float | None = None


class CannotCloneError(SpeakerRequestError):
    """The model that is served clones no voices, or not through us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The served model, asked anew each time: the host knows it only after its start.

    Attributes:
        family: Returns its family; None if it does not clone through us.
        refusal: Returns why it clones no voices; None if it does, or is not ours.
        note: Returns what the host does with references, for a model that is not ours.
    """

    family: Callable[[], Family | None]
    refusal: Callable[[], str | None]
    note: Callable[[], str]

    @property
    def reason(self) -> str:
        """The reason why voices are not precomputed here."""
        return self.refusal() or self.note()

    def check_clones(self) -> None:
        """Refuse if the checkpoint clones no voices. Raises: CannotCloneError."""
        if self.refusal() is not None:
            raise CannotCloneError(self.reason)

    @property
    def max_clips(self) -> int:
        """How many clips a voice may be made of."""
        family = self.family()
        return 1 if family is None else family.max_clips

    def check_clips(self, num_clips: int) -> None:
        """Refuse a voice of too many clips. Raises: CannotCloneError."""
        if (problem := clips_problem(self.family(), num_clips)) is not None:
            raise CannotCloneError(f"The voice cannot be spoken here: {problem}.")

    def need_of(self, record: SpeakerRecord) -> EncodingNeed:
        """Return the encodings to precompute for a speaker with audio.

        Raises: CannotCloneError: The model clones no voices, or not this one, which was
            registered for another model.
        """
        assert record.audio_sha256 is not None
        self.check_clips(record.num_clips)
        if (family := self.family()) is None:
            raise CannotCloneError(self.reason)
        length = record.num_samples, record.sample_rate_hz
        if (problem := family.limits.problem(*length)) is not None:
            raise CannotCloneError(f"The voice cannot be spoken here: {problem}.")
        ref = SpeakerRef(audio_sha256=record.audio_sha256, segment=Segment.REGISTERED)
        names = family.precomputed(has_transcript=bool(record.ref_text))
        return EncodingNeed(ref=ref, encoder_names=names)

    def modes(self, record: SpeakerRecord) -> list[str]:
        """Name the modes for which a request has to name only the speaker."""
        if (family := self.family()) is None:
            return []
        if record.audio_sha256 is None:
            mode = family.embedding_mode
            return [] if mode is None else [mode.name]
        if clips_problem(family, record.num_clips) is not None:
            return []
        possible = possible_modes(family, has_transcript=bool(record.ref_text))
        return [mode.name for mode in possible]

    async def call_decoders(
        self, workers: AsyncWorkers, method: Method[A], call: DeleteCall | None = None
    ) -> list[A]:
        """Call the decoder stage of a family whose decoders keep states of voices.

        Returns each worker's answer; an empty list if no states are kept.

        Raises: WorkerRPCError.
        """
        family = self.family()
        if family is None or not family.decoders:
            return []
        try:
            return await workers.call(method, call)
        except UnsupportedModelError:
            return []  # states are switched off
