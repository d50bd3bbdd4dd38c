"""Prompts for Audio8 TTS in an ``Omni`` engine: real token ids, the codes in them."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from vllm_tts_cache.families.audio8_tts.family import CODEC
from vllm_tts_cache.families.audio8_tts.prompt import (
    PromptBuilder,
    SemanticCodes,
    check_text,
)
from vllm_tts_cache.offline.speakers import PreparedSpeaker
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.encoding import Encoding, EncodingKey


class Audio8Prompts:
    """Builds the prompts of one checkpoint.

    Args:
        model: Its folder, or Hugging Face id.
        config: Its ``config.json``.
        encoding: Returns one encoding of a prepared speaker, and its key.
    """

    def __init__(
        self,
        model: str,
        config: dict[str, Any],
        encoding: Callable[[SpeakerRef, str], tuple[EncodingKey, Encoding]],
    ):
        self._model = model
        self._config = config
        self._encoding = encoding

    def prompt(
        self, speaker: PreparedSpeaker, text: str, _language: str
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text``, in the language that it is in.

        Raises: InvalidSpeakerError, EncodeError, StorageError, WorkerRPCError.
        """
        assert speaker.ref_text is not None  # `prepare` has refused it
        check_text("text", text)
        check_text("ref_text", speaker.ref_text)
        key, encoding = self._encoding(speaker.ref, CODEC)
        semantic = SemanticCodes.of(key, encoding["codes"])
        return self._builder.clone(
            text, speaker.ref_text, ref=speaker.ref, semantic=semantic
        )

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.audio8_tts.configuration_audio8_tts import (  # noqa: E501
            Audio8TTSConfig,
        )

        return PromptBuilder(
            tokenizer=AutoTokenizer.from_pretrained(self._model),
            first_semantic_id=Audio8TTSConfig(**self._config).semantic_begin_id,
        )
