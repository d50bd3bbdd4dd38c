"""A clone's prompt on Higgs Audio v2: a turn of the reference, then the text's.

The host's chat, with the audio of the assistant's turn as so many placeholders.
"""

from functools import cached_property
from typing import Any

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
from vllm_tts_cache.families.networks.prompts import (
    Reference,
    engine_prompt,
    refuse_tokens,
)
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD

# Each codebook's codes begin one row later than those of the one before; the host has
# other placeholders in the last of these rows.
_NUM_DELAYED = NUM_CODEBOOKS - 1
# A row that begins the audio and one that ends it.
NUM_ADDED_ROWS = 2 + _NUM_DELAYED


class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer.

    Args:
        tokenizer: The checkpoint's, with its chat template.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model: str | None) -> "PromptBuilder":
        """Return one with the tokenizer of a checkpoint."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model))

    def clone(
        self,
        text: str,
        transcript: str | None,
        *,
        mode: Mode,  # noqa: ARG002  there is one
        clip: Reference,
    ) -> dict[str, Any]:
        """Return the prompt, see `PromptAdapter`."""
        assert transcript is not None  # the mode needs one
        num_rows = num_clip_frames(clip.num_samples, clip.sample_rate_hz)
        num_rows += NUM_ADDED_ROWS
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
        return engine_prompt(
            [*before_ids, *places, *after_ids],
            {FIELD: clip.ref.to_wire(), rows.FIELD: reference.to_wire()},
            f"{CODEC} {clip.ref.audio_sha256}",
        )

    def check_text(self, field: str, text: str) -> None:
        """Refuse a control token in a text, and the tag of a second speaker.

        Raises: InvalidSpeakerError.
        """
        refuse_tokens(self._control_tokens, field, text)
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
