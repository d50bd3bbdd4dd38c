"""A clone's prompt on Higgs Audio v2: a turn of the reference, then the text's.

The host's chat, with the audio of the assistant's turn as so many placeholders.
"""

from functools import cached_property
from typing import Any

from vllm.inputs import tokens_input
from vllm_omni.model_executor.models.higgs_audio_v2 import (
    higgs_audio_v2_tokenizer as host,
)

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.higgs_audio_v2.family import CODEC
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import (
    NUM_CODEBOOKS,
    num_clip_frames,
)
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef

# Each codebook's codes begin one row later than those of the one before; the host has
# other placeholders in the last of these rows.
_NUM_DELAYED = NUM_CODEBOOKS - 1
# A row that begins the audio and one that ends it.
NUM_ADDED_ROWS = 2 + _NUM_DELAYED


def num_reference_rows(num_samples: int, sample_rate_hz: int) -> int:
    """Return how many positions a clip takes."""
    return num_clip_frames(num_samples, sample_rate_hz) + NUM_ADDED_ROWS


class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer.

    Args:
        tokenizer: The checkpoint's, with its chat template.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def clone(
        self, text: str, transcript: str, *, ref: SpeakerRef, num_rows: int
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text`` as the reference does.

        Args:
            text: What to say; `check_text` has let it pass.
            transcript: What the reference says; likewise.
            ref: Whose voice.
            num_rows: Of the reference, see `num_reference_rows`.
        """
        chat = self._tokenizer.apply_chat_template(
            host.build_voice_clone_conversation(text, transcript),
            add_generation_prompt=True,
            tokenize=False,
        )
        # The host puts begin and end around the placeholders, where the template has
        # them already. A control token ends whatever text is before it.
        before, _, after = chat.partition(host._AUDIO_OUT_TOKEN)
        before_ids = self._ids(before + host._AUDIO_OUT_BOS_TOKEN)
        places = [self._id(host._AUDIO_OUT_TOKEN)] * (num_rows - _NUM_DELAYED)
        places += [self._id(host._AUDIO_DELAY_TOKEN)] * _NUM_DELAYED
        after_ids = self._ids(host._AUDIO_EOS_TOKEN + after)
        reference = ReferenceRows.behind(before_ids, num_rows)
        prompt: dict[str, Any] = {
            **tokens_input(prompt_token_ids=[*before_ids, *places, *after_ids])
        }
        prompt["additional_information"] = {
            FIELD: ref.to_wire(),
            rows.FIELD: reference.to_wire(),
        }
        prompt["cache_salt"] = f"{CODEC} {ref.audio_sha256}"
        return prompt

    def check_text(self, field: str, text: str) -> None:
        """Refuse a control token in a text, and the tag of a second speaker.

        Raises: InvalidSpeakerError.
        """
        for token in self._control_tokens:
            if token in text:
                reason = f"{token!r} is a control token of the model; leave it out"
                raise InvalidSpeakerError(field, reason)
        if found := host.MULTI_SPEAKER_TAG_PATTERN.search(text):
            reason = f"{found[0]} names one of several speakers; here there is one"
            raise InvalidSpeakerError(field, reason)

    @cached_property
    def _control_tokens(self) -> list[str]:
        return sorted(self._tokenizer.get_added_vocab())

    def _ids(self, text: str) -> list[int]:
        # The template has the token that a text begins with.
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _id(self, token: str) -> int:
        return self._tokenizer.convert_tokens_to_ids(token)
