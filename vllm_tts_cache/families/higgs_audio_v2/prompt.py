"""A clone's prompt on Higgs Audio v2: a turn of the reference, then the text's.

The prompt is the host's chat, with placeholders for the audio of the assistant's turn.
"""

from typing import Any

from vllm_omni.model_executor.models.higgs_audio_v2 import (
    higgs_audio_v2_tokenizer as host,
)

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.higgs_audio_v2.family import CODEC, FAMILY
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.families.networks.higgs_tokenizer import frames
from vllm_tts_cache.speaker.family import Mode

# Each codebook's codes begin one row later than those of the one before; in the rows
# that are added the host has another placeholder.
_NUM_DELAYED = frames.NUM_CODEBOOKS - 1
# A row that begins the audio and one that ends it.
NUM_ADDED_ROWS = 2 + _NUM_DELAYED


class PromptBuilder(prompts.PromptBuilder):
    """Builds prompts with a checkpoint's tokenizer, by its chat template."""

    family = FAMILY

    def clone(
        self, text: str, transcript: str | None, *, mode: Mode, clip: prompts.Reference
    ) -> dict[str, Any]:
        """Return the prompt, see `PromptAdapter`."""
        del mode  # there is one
        assert transcript is not None  # the mode needs one
        num_rows = frames.num_clip_frames(clip.num_samples, clip.sample_rate_hz)
        num_rows += NUM_ADDED_ROWS
        conversation = host.build_voice_clone_conversation(text, transcript)
        chat = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False
        )
        # The host puts begin and end around the placeholders, though the template has
        # them already. At a control token a text can be cut without changing its ids.
        before, _, after = chat.partition(host._AUDIO_OUT_TOKEN)
        before_ids = self._ids(before + host._AUDIO_OUT_BOS_TOKEN)
        places = [self._id(host._AUDIO_OUT_TOKEN)] * (num_rows - _NUM_DELAYED)
        places += [self._id(host._AUDIO_DELAY_TOKEN)] * _NUM_DELAYED
        after_ids = self._ids(host._AUDIO_EOS_TOKEN + after)
        reference = prompts.ReferenceRows.behind(before_ids, num_rows)
        ids = [*before_ids, *places, *after_ids]
        salt = f"{CODEC} {clip.ref.audio_sha256}"
        return prompts.prompt_with_rows(ids, clip.ref, reference, salt)

    def check_text(self, field: str, text: str) -> None:
        """Refuse a control token in a text, and the tag of a second speaker.

        Raises: InvalidSpeakerError.
        """
        super().check_text(field, text)
        if found := host.MULTI_SPEAKER_TAG_PATTERN.search(text):
            reason = f"{found[0]} names one of several speakers; leave it out"
            raise InvalidSpeakerError(field, reason)

    def _ids(self, text: str) -> list[int]:
        # The template already has the token that begins a text.
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _id(self, token: str) -> int:
        return self._tokenizer.convert_tokens_to_ids(token)


class HiggsAudioV2Prompts(prompts.OfflinePrompts):
    """Builds one checkpoint's prompts for an ``Omni`` engine."""

    prompt_builder = PromptBuilder
