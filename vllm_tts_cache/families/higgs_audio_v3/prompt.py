"""A clone's prompt on Higgs Audio v3: the voice first, then the text.

All texts of one voice begin with the same ids under the same salt, so the host's prefix
cache keeps one KV prefix for all of them. The reference's positions are placeholders;
the salt tells whose they are.
"""

from functools import cached_property
from typing import Any

from vllm.inputs import tokens_input
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    AUDIO_PLACEHOLDER_ID,
    HiggsAudioV3TokenizerAdapter,
)

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.higgs_audio_v3.family import CODEC
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import (
    NUM_CODEBOOKS,
    num_clip_frames,
)
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef

# Each codebook's codes begin one row later than those of the one before.
NUM_ADDED_ROWS = NUM_CODEBOOKS - 1
# Any text id will do, as no row is made of it. The host takes <|tts|>, which is five
# bytes of the message and not one.
FILLER_ID = 0


def num_reference_rows(num_samples: int, sample_rate_hz: int) -> int:
    """Return how many positions a clip takes."""
    return num_clip_frames(num_samples, sample_rate_hz) + NUM_ADDED_ROWS


class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer.

    Args:
        tokenizer: The checkpoint's.

    Attributes:
        hosts: What the host builds its prompts with.
    """

    def __init__(self, tokenizer: Any):
        self.hosts = HiggsAudioV3TokenizerAdapter(tokenizer)

    def clone(
        self, text: str, transcript: str | None, *, ref: SpeakerRef, num_rows: int
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text`` as the reference does.

        Args:
            text: What to say; `check_text` has let it pass.
            transcript: What the reference says, if that is known; likewise. A
                checkpoint without ``<|ref_text|>`` is not told.
            ref: Whose voice.
            num_rows: Of the reference, see `num_reference_rows`.
        """
        ids = self.hosts.build_prompt(
            text, num_ref_tokens=num_rows, reference_text=transcript
        )
        start = ids.index(AUDIO_PLACEHOLDER_ID)
        ids[start : start + num_rows] = [FILLER_ID] * num_rows
        reference = ReferenceRows.behind(ids[:start], num_rows)
        prompt: dict[str, Any] = {**tokens_input(prompt_token_ids=ids)}
        prompt["additional_information"] = {
            FIELD: ref.to_wire(),
            rows.FIELD: reference.to_wire(),
        }
        # The ids before the text are those of the transcript, and this one is of the
        # audio: nothing else shapes the voice's part of the KV.
        prompt["cache_salt"] = f"{CODEC} {ref.audio_sha256}"
        return prompt

    def check_text(self, field: str, text: str) -> None:
        """Refuse a control token in a text.

        Raises: InvalidSpeakerError.
        """
        for token in self._control_tokens:
            if token in text:
                reason = f"{token!r} is a control token of the model; leave it out"
                raise InvalidSpeakerError(field, reason)

    @cached_property
    def _control_tokens(self) -> list[str]:
        return sorted(self.hosts.tokenizer.get_added_vocab())
