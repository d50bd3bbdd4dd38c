"""What the host's speech serving class knows of the model, and what that refuses."""

from typing import Any

from vllm.multimodal.media import MediaConnector
from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

from vllm_tts_cache.catalogue.changes import SpeakerChanges
from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.entrypoints.adapter import CachedAdapter
from vllm_tts_cache.entrypoints.diffusion import DiffusionAdapter, other_model_of
from vllm_tts_cache.entrypoints.other_models import OtherModel, of_model
from vllm_tts_cache.entrypoints.request_speaker import refuse_embedding
from vllm_tts_cache.entrypoints.served_model import CannotCloneError
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.speaker.family import Family


class KnowsItsModel(OmniOpenAIServingSpeech):
    """The host's, which tells our routes and adapters of the model that it serves."""

    _diffusion_engine: Any  # the host's own, which has it of a diffusion model only
    _diffusion_adapter: DiffusionAdapter | None = None

    @property
    def builtin_names(self) -> frozenset[str]:
        """Speakers that come with the checkpoint."""
        if (adapter := getattr(self, "_adapter", None)) is None:
            return frozenset()
        known = adapter.capabilities
        return frozenset(known.supported_speakers) | frozenset(
            known.precomputed_speakers
        )

    @property
    def served_family(self) -> Family | None:
        """The family of the model that is served; None if it clones not through us."""
        adapter = self.cached_adapter
        if adapter is None or not adapter.tts_cache_clones:
            return None
        return adapter.tts_cache_family

    @property
    def checkpoint_name(self) -> str:
        """What the server was started with: two checkpoints sound different."""
        if self._diffusion_mode:
            return str(getattr(self, "_diffusion_model_name", ""))
        return str(self.model_config.model)

    @property
    def refusal(self) -> str | None:
        """Why the checkpoint clones no voices, in one text for all who ask."""
        adapter = self.cached_adapter
        return None if adapter is None else adapter.tts_cache_refusal

    @property
    def other_model(self) -> OtherModel:
        """What there is to say of a model that is of no family of ours."""
        if self._diffusion_mode:  # the host calls each of them OmniVoice
            return other_model_of(self._diffusion_engine)
        return of_model(self._tts_model_type)

    @property
    def note(self) -> str | None:
        """What becomes of references on such a model; None on one of ours."""
        if self.served_family is not None or self.refusal is not None:
            return None
        return self.other_model.note(self._get_tts_adapter())

    @property
    def cached_adapter(self) -> CachedAdapter | None:
        """Ours, of a model that is of a family of ours."""
        if self._diffusion_mode:
            return self._diffusion_adapter
        adapter = self._get_tts_adapter()
        return adapter if isinstance(adapter, CachedAdapter) else None

    @property
    def media_connector(self) -> MediaConnector:
        """The host's, which knows what may be fetched."""
        if self._media_connector is None:
            self._media_connector = MediaConnector(
                allowed_local_media_path=self.model_config.allowed_local_media_path,
                allowed_media_domains=self.model_config.allowed_media_domains,
            )
        return self._media_connector

    def check_new(self, name: str, ref_text: str | None) -> None:
        """Refuse a voice that nobody could speak with, and a name that is taken.

        Raises: InvalidSpeakerError, CannotCloneError.
        """
        if self.refusal is not None:
            raise CannotCloneError(self.refusal)
        if self.note is not None and not self._takes_voices:
            raise CannotCloneError(self.note)
        self._check_name(name)
        self._check_ref_text(ref_text)

    def check_changes(self, changes: SpeakerChanges) -> None:
        """Refuse a new name that is taken, and a transcript that cannot be used.

        Raises: InvalidSpeakerError.
        """
        if "name" in changes.given:
            self._check_name(changes.given["name"])
        self._check_ref_text(changes.given.get("ref_text"))

    def _check_name(self, name: str) -> None:
        if fold(name) in {fold(builtin) for builtin in self.builtin_names}:
            reason = f"{name!r} is a built-in voice of this model; choose another"
            raise InvalidSpeakerError("name", reason)

    def _check_ref_text(self, ref_text: str | None) -> None:
        adapter = self.cached_adapter
        if adapter is not None and ref_text is not None:
            adapter.tts_cache_check_text("ref_text", ref_text)

    def check_embedding(self, embedding: tuple[float, ...]) -> None:
        """Refuse a raw embedding that the model cannot speak with.

        Raises: InvalidSpeakerError.
        """
        field = "speaker_embedding"
        if (family := self.served_family) is not None:
            refuse_embedding(family, field)
        elif not self.other_model.takes_embeddings:
            reason = (
                f"{self.other_model.title} takes reference audio, not an embedding; "
                "register the voice with audio_sample"
            )
            raise InvalidSpeakerError(field, reason)
        if (adapter := self._get_tts_adapter()) is not None:
            problem = adapter.validate_tts_embedding_dim(len(embedding))
            if problem is not None:
                raise InvalidSpeakerError(field, problem)

    @property
    def _takes_voices(self) -> bool:
        other = self.other_model
        return other.takes_embeddings or other.takes_clips(self._get_tts_adapter())
