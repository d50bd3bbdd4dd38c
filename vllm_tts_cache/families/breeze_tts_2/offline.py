"""Prompts for Breeze-TTS-2 in an ``Omni`` engine."""

from functools import cached_property
from typing import Any

from vllm_tts_cache.families.breeze_tts_2.prompt import (
    by_address,
    check_text,
    control_tokens,
    silence,
)
from vllm_tts_cache.offline.speakers import PreparedSpeaker


class BreezePrompts:
    """Builds the prompts of one checkpoint.

    Args:
        model: Its folder, or Hugging Face id.
    """

    def __init__(self, model: str, _config: object, _encoding: object):
        # A prompt holds no more of a reference than its length.
        self._model = model

    def prompt(
        self, speaker: PreparedSpeaker, text: str, _language: str
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text``, in the language that it is in.

        Raises: InvalidSpeakerError.
        """
        from vllm_omni.model_executor.models.breeze_tts_2.prompt import (
            build_breeze_prompt,
        )

        assert speaker.ref_text is not None  # `prepare` has refused it
        check_text(self._control_tokens, "text", text)
        check_text(self._control_tokens, "ref_text", speaker.ref_text)
        prompt: Any = build_breeze_prompt(
            self._tokenizer,
            text,
            ref_audio=silence(speaker.num_samples, speaker.sample_rate_hz),
            ref_text=speaker.ref_text,
        )
        return by_address(prompt, speaker.ref)

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(self._model)
        return AutoTokenizer.from_pretrained(self._model, config=config)

    @cached_property
    def _control_tokens(self) -> list[str]:
        return control_tokens(self._tokenizer)
