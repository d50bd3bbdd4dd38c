"""What the generic parts need to know of Qwen3-TTS."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_tts_cache import stage_configs
from vllm_tts_cache.speaker.checkpoint_dir import config_says, read_json
from vllm_tts_cache.speaker.family import ControlTokens, Family, Mode, Transcript

SPEAKER = "speaker"
CODEC = "codec"

# The only text field of a request that the host sends on from the talker to the
# decoder; a Base checkpoint does not use it, so it carries the content address.
HANDED_ON = "speaker"

MODEL_TYPE = "qwen3_tts"
X_VECTOR = Mode(
    name="x_vector",
    encoders=(SPEAKER,),
    transcript=Transcript.UNUSED,
    takes_embedding=True,
    stand_in={"task_type": "Base", "x_vector_only_mode": True},
)
IN_CONTEXT = Mode(
    name="in_context",
    encoders=(SPEAKER, CODEC),
    transcript=Transcript.REQUIRED,
    stand_in={"task_type": "Base", "x_vector_only_mode": False},
)
_HERE = "vllm_tts_cache.families.qwen3_tts"


def kind_of(config: Mapping[str, Any]) -> str:
    """Return the kind of a checkpoint, ``base`` for instance, as the host reads it.

    The official ones say ``base``, ``custom_voice`` or ``voice_design``.
    """
    return re.sub("[^a-z]", "", str(config.get("tts_model_type")).lower())


def why_it_clones_nothing(model_dir: Path) -> str | None:
    """Say why a checkpoint clones no voices; None for a Base checkpoint.

    Raises: CheckpointError.
    """
    config = read_json(model_dir / "config.json")
    if kind_of(config) == "base":
        return None
    presets = sorted((config.get("talker_config") or {}).get("spk_id") or {})
    instead = (
        f"It has the voices {', '.join(presets)}: name one in `voice`"
        if presets
        else "Describe the voice in `instructions`"
    )
    return (
        f"This Qwen3-TTS checkpoint ({config.get('tts_model_type')}) has no reference "
        f"encoders, so it cannot clone a voice. {instead}, or serve a Base checkpoint."
    )


# Slow speech, and a pause before and after it.
_FRAMES_PER_SECOND = 12.5
_PAUSE_SECONDS = 2.0
_LETTERS_PER_SECOND = 8.0
_IDEOGRAMS_PER_SECOND = 2.5
_FIRST_IDEOGRAM = "\u2e80"  # from here on most characters take a syllable or more


def plausible_frames(text: str) -> int:
    """Return how many frames a slow speaker takes for a text."""
    num_ideograms = sum(character >= _FIRST_IDEOGRAM for character in text)
    seconds = _PAUSE_SECONDS + num_ideograms / _IDEOGRAMS_PER_SECOND
    seconds += (len(text) - num_ideograms) / _LETTERS_PER_SECOND
    return math.ceil(_FRAMES_PER_SECOND * seconds)


FAMILY = Family(
    name="qwen3_tts",
    short_name="qwen3",
    title="Qwen3-TTS",
    modes=(X_VECTOR, IN_CONTEXT),
    recognises=lambda model_dir: config_says(model_dir, "model_type", MODEL_TYPE),
    clones=why_it_clones_nothing,
    models={
        "Qwen3TTSTalkerForConditionalGeneration": f"{_HERE}.worker:CachedQwen3TTSTalker"
    },
    decoders={"Qwen3TTSCode2Wav": f"{_HERE}.code2wav:CachedQwen3TTSCode2Wav"},
    adapter=f"{_HERE}.adapter:CachedQwen3TTSAdapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    offline_part=f"{_HERE}.offline:Qwen3TTSPrompts",
    tiny_part=f"{_HERE}.tiny:write",
    tiny_options=f"{_HERE}.tiny:CheckpointOptions",
    deploy_file=stage_configs.FOLDER / "qwen3_tts_cpu.yaml",
    side_files=(
        "config.json",
        "speech_tokenizer/config.json",
        "speech_tokenizer/model.safetensors",
    ),
    sample_rate_hz=24_000,
    # No row of a prompt is found by its id, so these are all that a text could forge.
    control=ControlTokens(
        "<|im_start|> <|im_end|> <|endoftext|> <|audio_start|> <|audio_end|> "
        "<|audio_pad|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single>"
    ),
    # The last id of the codec vocabulary, where the talker masks every id from 2048 up
    # but its end of speech.
    failure_id=3071,
    # A preempted request does not resume: the host keeps the progress of the text and
    # each frame's codes in buffers that it drops, or does not rewind.
    plausible_tokens=plausible_frames,
    asks_inline_transcript=True,
    official="qwen-tts 0.1.1",
    never_run="a released checkpoint, a GPU",
    is_default=True,
)
