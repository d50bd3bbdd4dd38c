"""A clone's prompt on Higgs Audio v3: the voice first, then the text.

All texts of one voice begin with the same ids under the same salt, so the host's prefix
cache keeps one KV prefix for all of them. The reference's positions are placeholders;
the salt tells whose they are.
"""

from functools import cached_property
from typing import Any

from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    AUDIO_PLACEHOLDER_ID,
    HiggsAudioV3TokenizerAdapter,
)

from vllm_tts_cache.families.higgs_audio_v3.family import CODEC
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import (
    NUM_CODEBOOKS,
    num_clip_frames,
)
from vllm_tts_cache.families.networks.prompts import (
    Reference,
    engine_prompt,
    refuse_tokens,
)
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD

# Each codebook's codes begin one row later than those of the one before.
NUM_ADDED_ROWS = NUM_CODEBOOKS - 1
# Any text id will do, as no row is made of it. The host takes <|tts|>, which is five
# bytes of the message and not one.
FILLER_ID = 0


class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer.

    Args:
        tokenizer: The checkpoint's.

    Attributes:
        hosts: What the host builds its prompts with.
    """

    def __init__(self, tokenizer: Any):
        self.hosts = HiggsAudioV3TokenizerAdapter(tokenizer)

    @classmethod
    def of(cls, model: str | None) -> "PromptBuilder":
        """Return one with the tokenizer of a checkpoint, loaded as the host does."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model, trust_remote_code=True))

    def clone(
        self,
        text: str,
        transcript: str | None,
        *,
        mode: Mode,  # noqa: ARG002  there is one
        clip: Reference,
    ) -> dict[str, Any]:
        """As every builder; without ``<|ref_text|>`` the transcript is left out."""
        num_rows = num_clip_frames(clip.num_samples, clip.sample_rate_hz)
        num_rows += NUM_ADDED_ROWS
        ids = self.hosts.build_prompt(
            text, num_ref_tokens=num_rows, reference_text=transcript
        )
        start = ids.index(AUDIO_PLACEHOLDER_ID)
        ids[start : start + num_rows] = [FILLER_ID] * num_rows
        reference = ReferenceRows.behind(ids[:start], num_rows)
        information = {FIELD: clip.ref.to_wire(), rows.FIELD: reference.to_wire()}
        # The ids before the text are those of the transcript, and this one is of the
        # audio: nothing else shapes the voice's part of the KV.
        return engine_prompt(ids, information, f"{CODEC} {clip.ref.audio_sha256}")

    def check_text(self, field: str, text: str) -> None:
        """Refuse a control token in a text.

        Raises: InvalidSpeakerError.
        """
        refuse_tokens(self._control_tokens, field, text)

    @cached_property
    def _control_tokens(self) -> list[str]:
        return sorted(self.hosts.tokenizer.get_added_vocab())
