"""The speaker side of a model in a worker, whatever kind of model it is."""

from collections.abc import Sequence
from typing import Any, ClassVar

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.model_executor.agreement import Ranks
from vllm_tts_cache.model_executor.load_speakers import (
    load_encoders,
    load_worker_speakers,
    why_it_clones_nothing,
)
from vllm_tts_cache.model_executor.speakers import WorkerSpeakers
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.store.encoding import Encoding


class SpeakerSide:
    """Loads a checkpoint's reference encoders, and looks up what they have made."""

    tts_cache_family: ClassVar[Family]
    tts_cache_speakers: WorkerSpeakers | None = None
    # Why the checkpoint clones no voices, if it does not.
    tts_cache_refusal: str | None = None
    # Model and revision that both of these are of.
    _speakers_of: tuple[str, str | None] | None = None

    def _load_speakers(self, vllm_config: Any) -> None:
        """Load the reference encoders, if the checkpoint has any.

        Weights may be loaded again and again, from memory or from another checkpoint.
        The encode thread, the store and what they have in hand outlive that.
        """
        model = vllm_config.model_config
        if (checkpoint := (model.model, model.revision)) == self._speakers_of:
            return
        family, ranks = self.tts_cache_family, self._ranks()
        self.tts_cache_refusal = why_it_clones_nothing(vllm_config, family, ranks)
        if self.tts_cache_refusal is not None:
            self._close_speakers()
        elif self.tts_cache_speakers is None:
            self.tts_cache_speakers = load_worker_speakers(vllm_config, family, ranks)
        else:
            load_encoders(self.tts_cache_speakers, vllm_config, family)
        self._speakers_of = checkpoint

    def _close_speakers(self) -> None:
        speakers, self.tts_cache_speakers = self.tts_cache_speakers, None
        if speakers is not None:
            speakers.close()

    def _encodings(
        self, ref: SpeakerRef, encoder_names: Sequence[str]
    ) -> dict[str, Encoding]:
        """Return what a prompt needs. Raises: TTSCacheError if it is not there."""
        if self.tts_cache_speakers is None:
            raise TTSCacheError(self.tts_cache_refusal or "it clones no voices")
        return self.tts_cache_speakers.prompt(ref, encoder_names)

    def _count_prompt(self) -> None:
        if self.tts_cache_speakers is not None:
            self.tts_cache_speakers.count_prompt()

    def _ranks(self) -> Ranks | None:
        """Return the processes that run the model together; None for vLLM's own."""
        return None
