"""A clone's prompt on Higgs Audio v3: the voice first, then the text.

All texts of one voice begin with the same ids under the same salt, so the host's prefix
cache keeps one KV prefix for all of them. The reference's positions are placeholders;
the salt names the reference.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    AUDIO_PLACEHOLDER_ID,
    HiggsAudioV3TokenizerAdapter,
)

from vllm_tts_cache.families.higgs_audio_v3.family import CODEC, FAMILY
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.families.networks.higgs_tokenizer import frames
from vllm_tts_cache.speaker.family import Mode

# Each codebook's codes begin one row later than those of the one before.
NUM_ADDED_ROWS = frames.NUM_CODEBOOKS - 1
# Any text id will do, as its row is replaced. The host's filler, <|tts|>, takes five
# bytes of a message instead of one.
FILLER_ID = 0


class PromptBuilder(prompts.PromptBuilder):
    """Builds prompts with a checkpoint's tokenizer by ``hosts``, the host's builder."""

    family = FAMILY
    # As the host loads it.
    loading: ClassVar[Mapping[str, Any]] = {"trust_remote_code": True}

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.hosts = HiggsAudioV3TokenizerAdapter(tokenizer)

    def clone(
        self, text: str, transcript: str | None, *, mode: Mode, clip: prompts.Reference
    ) -> dict[str, Any]:
        """Return the prompt; a model without ``<|ref_text|>`` uses no transcript."""
        del mode  # there is one
        num_rows = frames.num_clip_frames(clip.num_samples, clip.sample_rate_hz)
        num_rows += NUM_ADDED_ROWS
        given = {"num_ref_tokens": num_rows, "reference_text": transcript}
        ids = self.hosts.build_prompt(text, **given)
        start = ids.index(AUDIO_PLACEHOLDER_ID)
        ids[start : start + num_rows] = [FILLER_ID] * num_rows
        reference = prompts.ReferenceRows.behind(ids[:start], num_rows)
        # The ids before the text are the transcript's, and the salt names the audio;
        # only these two shape the voice's part of the KV.
        salt = f"{CODEC} {clip.ref.audio_sha256}"
        return prompts.prompt_with_rows(ids, clip.ref, reference, salt)


class HiggsAudioV3Prompts(prompts.OfflinePrompts):
    """Builds one checkpoint's prompts for an ``Omni`` engine."""

    prompt_builder = PromptBuilder
