"""Prompts for Fish Speech in an ``Omni`` engine: real token ids, the codes in them."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

from vllm_tts_cache.families.fish_speech import prompt as fish_prompt
from vllm_tts_cache.families.fish_speech.family import CODEC
from vllm_tts_cache.offline.speakers import PreparedSpeaker
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.encoding import Encoding, EncodingKey


class FishSpeechPrompts:
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
        fish_prompt.checked_text("text", text)
        fish_prompt.checked_text("ref_text", speaker.ref_text)
        key, encoding = self._encoding(speaker.ref, CODEC)
        built = self._builder.clone(text, speaker.ref_text, key, encoding["codes"])
        return built.to_engine(speaker.ref)

    @cached_property
    def _builder(self) -> fish_prompt.PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.fish_speech.configuration_fish_speech import (  # noqa: E501
            FishSpeechConfig,
        )

        config = FishSpeechConfig(**self._config)
        return fish_prompt.PromptBuilder(
            tokenizer=AutoTokenizer.from_pretrained(self._model),
            first_semantic_id=int(config.semantic_start_token_id),
        )
