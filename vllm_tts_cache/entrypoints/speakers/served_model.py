"""What the served model can do with a registered voice, and what its decoders keep."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_tts_cache.catalogue.records import Segment, SpeakerRecord
from vllm_tts_cache.errors import SpeakerRequestError
from vllm_tts_cache.speaker.family import Family, clips_problem, possible_modes
from vllm_tts_cache.speaker.reference import EncodingNeed, SpeakerRef
from vllm_tts_cache.speaker.rpc_client import (
    DECODER_STATS,
    DELETE_STATES,
    A,
    AsyncWorkers,
    Method,
    UnsupportedModelError,
)
from vllm_tts_cache.speaker.wire import DecoderStats, DeleteCall


class Decoders:
    """Asks the stage behind the talker, of families that keep something there.

    Args:
        workers: None where there are none.
        family: The one that is served; None if it is none of ours.
    """

    def __init__(
        self, workers: AsyncWorkers | None, family: Callable[[], Family | None]
    ):
        self._workers = workers
        self._family = family

    async def delete(self, call: DeleteCall) -> None:
        """Delete what is kept of these audios. Raises: WorkerRPCError."""
        await self._call(DELETE_STATES, call)

    async def stats(self) -> list[DecoderStats]:
        """Each worker's counters and sizes; none where nothing is kept.

        Raises: WorkerRPCError.
        """
        return await self._call(DECODER_STATS)

    async def _call(self, method: Method[A], call: DeleteCall | None = None) -> list[A]:
        family = self._family()
        if self._workers is None or family is None or not family.decoders:
            return []
        try:
            return await self._workers.call(method, call)
        except UnsupportedModelError:
            return []  # it is switched off


class CannotCloneError(SpeakerRequestError):
    """The model that is served clones no voices, or not through us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model, asked each time: the host knows it some time after it started.

    Attributes:
        family: Tells which family it is of; None if it clones not through us.
        refusal: Tells why it clones no voices, if a family of ours knows.
        note: Tells what becomes of references on a model that is of no family of ours.
    """

    family: Callable[[], Family | None]
    refusal: Callable[[], str | None]
    note: Callable[[], str]

    @property
    def reason(self) -> str:
        """Why voices are not precomputed here."""
        return self.refusal() or self.note()

    def check_clones(self) -> None:
        """Refuse what the checkpoint cannot do. Raises: CannotCloneError."""
        if self.refusal() is not None:
            raise self.cannot_clone()

    def cannot_clone(self) -> CannotCloneError:
        """The error that says why it does not."""
        return CannotCloneError(self.reason)

    @property
    def max_clips(self) -> int:
        """How many clips a voice may be made of."""
        family = self.family()
        return 1 if family is None else family.max_clips

    def check_clips(self, num_clips: int) -> None:
        """Refuse a registered voice of more clips than the model takes.

        Raises: CannotCloneError.
        """
        if (problem := clips_problem(self.family(), num_clips)) is not None:
            raise CannotCloneError(f"The voice cannot be spoken here: {problem}.")

    def need_of(self, record: SpeakerRecord) -> EncodingNeed:
        """Return what a speaker with audio needs in its own modes.

        Raises: CannotCloneError.
        """
        assert record.audio_sha256 is not None
        self.check_clips(record.num_clips)
        if (family := self.family()) is None:
            raise self.cannot_clone()
        ref = SpeakerRef(audio_sha256=record.audio_sha256, segment=Segment.REGISTERED)
        names = family.precomputed(has_transcript=bool(record.ref_text))
        return EncodingNeed(ref=ref, encoder_names=names)

    def modes(self, record: SpeakerRecord) -> list[str]:
        """Name the ways to clone that need nothing more than the speaker."""
        if (family := self.family()) is None:
            return []
        if record.audio_sha256 is None:
            mode = family.embedding_mode
            return [] if mode is None else [mode.name]
        if clips_problem(family, record.num_clips) is not None:
            return []
        has_transcript = bool(record.ref_text)
        possible = possible_modes(family, has_transcript=has_transcript)
        return [mode.name for mode in possible]
