"""A clone's prompt on CosyVoice3: a placeholder id for each row that the worker makes.

The talker reads ``[start] [texts] [turn] [codes]``: the prompt's text and the text to
speak, then, in a zero-shot clone, the reference's speech tokens. Ids of texts and of
codes index two different tables, so placeholders stand for both. The worker makes the
rows from the additional information: the ids of either text, the name of the mode, and
the reference's content address.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_tts_cache.errors import InvalidSpeakerError, TTSCacheError
from vllm_tts_cache.families.cosyvoice3.family import CROSS_LINGUAL, FAMILY, ZERO_SHOT
from vllm_tts_cache.families.cosyvoice3.positions import num_used_tokens
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.families.networks.prompts import MODE, Prompt, Reference
from vllm_tts_cache.offline import PreparedSpeaker
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD

TEXT_IDS = "tts_cache_text_ids"

# The model was trained on prompts that hold this mark, once: the text before it is no
# transcript. The official code fails a request without it.
END_OF_PROMPT = "<|endofprompt|>"
SYSTEM = "You are a helpful assistant."

NUM_MARKS = 2  # the start and the turn
# Any id will do: no row is looked up by it.
_PLACEHOLDER = 1


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that the talker reads: the prompt's, then the one to speak."""

    prompt: str
    spoken: str


def texts_of(
    mode: Mode, text: str, *, transcript: str | None, instructions: str | None
) -> Texts:
    """Return both texts, with the mark where the official examples have it.

    The text before the mark is returned unchanged if it has the mark already.

    Raises: InvalidSpeakerError if the mode needs instructions and there are none, or if
        there are two marks: what is to be said would begin before the second.

    Source: ``example.py`` of the official code, and ``frontend_*`` of its front end.
    """
    if mode is CROSS_LINGUAL:
        texts = Texts("", _marked(text, f"{SYSTEM}{END_OF_PROMPT}{{}}"))
    elif mode is ZERO_SHOT:
        texts = Texts(_marked(transcript or "", f"{SYSTEM}{END_OF_PROMPT}{{}}"), text)
    else:
        needed = needed_instructions(instructions)
        texts = Texts(_marked(needed, f"{SYSTEM} {{}}{END_OF_PROMPT}"), text)
    if (texts.prompt + texts.spoken).count(END_OF_PROMPT) > 1:
        field = "ref_text" if mode is ZERO_SHOT else "instructions"
        reason = f"{END_OF_PROMPT!r} may stand once before what is said; leave it out"
        raise InvalidSpeakerError("input" if END_OF_PROMPT in text else field, reason)
    return texts


def needed_instructions(instructions: str | None) -> str:
    """Return the instructions for a mode that needs some.

    Raises: InvalidSpeakerError if there are none.
    """
    if instructions is None or not instructions.strip():
        reason = "this mode needs them: say how to speak, or leave the mode out"
        raise InvalidSpeakerError("instructions", reason)
    return instructions


def _marked(text: str, template: str) -> str:
    return text if END_OF_PROMPT in text else template.format(text)


_FILES = ("config.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def load_tokenizer(model: str, revision: str | None, config: Any) -> Any:
    """Return the host's tokenizer of a checkpoint; the host's config names its folder.

    Raises: CheckpointError that says what to download.
    """
    from vllm_omni.model_executor.models.cosyvoice3.tokenizer import get_qwen_tokenizer

    folder = str(config.qwen_pretrain_path)
    needed = [f"{folder}/{name}" for name in _FILES]
    model_dir = checkpoint_dir(model, revision, side_files=needed)
    return get_qwen_tokenizer(
        token_path=str(model_dir / folder),
        skip_special_tokens=config.skip_special_tokens,
        version=config.version,
    )


class PromptBuilder(prompts.PromptBuilder):
    """Builds prompts with the host's tokenizer of a checkpoint."""

    family = FAMILY

    def clone(self, texts: Texts, *, mode: Mode, clip: Reference) -> dict[str, Any]:
        """Return the prompt that speaks as the clip does."""
        ids = self._ids(texts.prompt), self._ids(texts.spoken)
        num_ids = sum(map(len, ids))
        num_tokens = num_used_tokens(clip.num_samples, clip.sample_rate_hz)
        length = count_positions(mode, num_ids=num_ids, num_tokens=num_tokens)
        information = {FIELD: clip.ref.to_wire(), MODE: mode.name, TEXT_IDS: [*ids]}
        return prompts.engine_prompt([_PLACEHOLDER] * length, information)

    @cached_property
    def _control_tokens(self) -> list[str]:
        return self.family.control.of(self._tokenizer.tokenizer)

    def _ids(self, text: str) -> list[int]:
        # The tokenizer makes a tensor of floats of an empty text.
        return self._tokenizer.encode(text) if text else []


def count_positions(mode: Mode, *, num_ids: int, num_tokens: int) -> int:
    """Return the length of a prompt; the worker has to make as many rows.

    Of the reference's speech tokens, ``num_tokens`` are used.
    """
    return NUM_MARKS + num_ids + (num_tokens if has_codes(mode) else 0)


def has_codes(mode: Mode) -> bool:
    """Tell whether the talker reads the reference's speech tokens."""
    return mode is ZERO_SHOT


def ids_of_request(info: Mapping[str, Any], vocab_size: int) -> Sequence[int]:
    """Read both texts' ids out of a request's additional information, in their order.

    Raises: TTSCacheError if they are missing, or one is outside of the vocabulary.
    """
    match info.get(TEXT_IDS):
        case [[*prompt], [*spoken]] if all(isinstance(i, int) for i in prompt + spoken):
            ids = prompt + spoken
        case other:
            raise TTSCacheError(f"{TEXT_IDS} is not two lists of ids: {other!r:.60}")
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        # On a GPU an index out of range would end the process.
        raise TTSCacheError("one of its text ids is outside of the vocabulary")
    return ids


class CosyVoice3Prompts(prompts.OfflinePrompts):
    """Builds one checkpoint's prompts for an ``Omni`` engine.

    They do not limit the length of a speech: give ``max_tokens`` and ``min_tokens`` in
    the sampling parameters, 20 and 2 a token of text in the official code.
    """

    def _clone(self, speaker: PreparedSpeaker, text: str) -> Prompt:
        mode, transcript = speaker.mode, speaker.ref_text
        texts = texts_of(mode, text, transcript=transcript, instructions=None)
        return self._builder.clone(texts, mode=mode, clip=speaker)

    @cached_property
    def _builder(self) -> PromptBuilder:
        from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

        # The host's defaults; the checkpoint's config is not read.
        tokenizer = load_tokenizer(self._model, None, CosyVoice3Config())
        return PromptBuilder(tokenizer)
