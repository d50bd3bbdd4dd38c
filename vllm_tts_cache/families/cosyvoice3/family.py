"""What the generic parts need to know of CosyVoice3."""

from pathlib import Path

from vllm_tts_cache import stage_configs
from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import (
    ClipLimits,
    ControlTokens,
    Family,
    Mode,
    Transcript,
)

# The decoder gets all three in every mode; modes differ in the talker's input.
TOKENS = "speech_tokens"
MEL = "mel"
SPEAKER = "speaker"
ENCODERS = (TOKENS, MEL, SPEAKER)

MODEL_TYPE = "cosyvoice3"
# Files of a released checkpoint that no other model has.
OWN_FILES = ("cosyvoice3.yaml", "speech_tokenizer_v3.onnx")
# The host has zero-shot clones only, and requires a transcript of each.
_NO_TRANSCRIPT = "-"

CROSS_LINGUAL = Mode(
    name="cross_lingual",
    encoders=ENCODERS,
    transcript=Transcript.UNUSED,
    stand_in={"ref_text": _NO_TRANSCRIPT},
)
ZERO_SHOT = Mode(name="zero_shot", encoders=ENCODERS, transcript=Transcript.REQUIRED)
INSTRUCT = Mode(
    name="instruct",
    encoders=ENCODERS,
    transcript=Transcript.UNUSED,
    stand_in={"ref_text": _NO_TRANSCRIPT},
    example={"instructions": "Please speak as fast as possible."},
)
_HERE = "vllm_tts_cache.families.cosyvoice3"


def is_cosyvoice3(model_dir: Path) -> bool:
    """Tell whether a directory holds a CosyVoice3 checkpoint.

    A released ``config.json`` is empty, and the host goes by the directory's name.
    """
    named = config_says(model_dir, "model_type", MODEL_TYPE)
    return named or any((model_dir / name).is_file() for name in OWN_FILES)


FAMILY = Family(
    name="cosyvoice3",
    short_name="cosyvoice3",
    title="CosyVoice3",
    modes=(CROSS_LINGUAL, ZERO_SHOT, INSTRUCT),
    recognises=is_cosyvoice3,
    # The model of both stages; its config names the stage.
    models={"CosyVoice3Model": f"{_HERE}.worker:CachedCosyVoice3Model"},
    host_is_multimodal=True,
    waits_for_outputs_of="cosyvoice3",
    adapter=f"{_HERE}.adapter:CachedCosyVoice3Adapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    encodes_on_cpu=True,
    offline_part=f"{_HERE}.prompt:CosyVoice3Prompts",
    tiny_part=f"{_HERE}.tiny:write",
    deploy_file=stage_configs.FOLDER / "cosyvoice3_cpu.yaml",
    side_files=("speech_tokenizer_v3.onnx", "campplus.onnx"),
    sample_rate_hz=24_000,
    # Sounds and phonemes, and the mark of a prompt, which `texts_of` looks after.
    control=ControlTokens(tags=r"\[[^\]]+\]|</?(laughter|strong)>|<\|endofprompt\|>"),
    # The last of the talker's own ids. Codes are 0 to 6,560; of those behind them only
    # 6,562 is ever sampled, which ends a speech.
    failure_id=6_760,
    needs_first_runner=True,  # the second needs more of `preprocess_decode_batch`
    # A position after the prompt is built from its id alone.
    resumes=True,
    # The official code refuses other clips.
    limits=ClipLimits(min_sample_rate_hz=16_000, max_seconds=30.0),
    asks_inline_transcript=True,
    official="each part of the official code at ace7c47, which is in no package",
    never_run="a released checkpoint, a GPU",
)
