"""Prompts for CosyVoice3 in an ``Omni`` engine: placeholder ids of the right number."""

from functools import cached_property
from typing import Any

from vllm_tts_cache.families.cosyvoice3.prompt import PromptBuilder, texts_of
from vllm_tts_cache.families.cosyvoice3.text import load_tokenizer
from vllm_tts_cache.families.networks.offline import OfflinePrompts
from vllm_tts_cache.offline.speakers import PreparedSpeaker


class CosyVoice3Prompts(OfflinePrompts):
    """Builds the prompts of one checkpoint.

    How long a speech may be is not in them: give ``max_tokens`` and ``min_tokens`` in
    the sampling parameters, 20 and 2 a token of text in the official code.
    """

    def prompt(
        self, speaker: PreparedSpeaker, text: str, _language: str
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text``, in the language that it is in."""
        texts = texts_of(
            speaker.mode, text, transcript=speaker.ref_text, instructions=None
        )
        return self._builder.clone(texts, mode=speaker.mode, clip=speaker)

    @cached_property
    def _builder(self) -> PromptBuilder:
        from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

        # The host's own: what the checkpoint says is not read.
        tokenizer = load_tokenizer(self._model, None, CosyVoice3Config())
        return PromptBuilder(tokenizer)
