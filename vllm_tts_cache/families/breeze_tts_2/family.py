"""What the generic parts need to know of Breeze-TTS-2."""

from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import ControlTokens, Family, Mode, Transcript

CODEC = "codec"
CODEC_FOLDER = "audio_tokenizer"

MODEL_TYPE = "breeze"
IN_CONTEXT = Mode(name="in_context", encoders=(CODEC,), transcript=Transcript.REQUIRED)
_HERE = "vllm_tts_cache.families.breeze_tts_2"

FAMILY = Family(
    name="breeze_tts_2",
    short_name="breeze",
    title="Breeze-TTS-2",
    modes=(IN_CONTEXT,),
    recognises=lambda model_dir: config_says(model_dir, "model_type", MODEL_TYPE),
    models={"BreezeForConditionalGeneration": f"{_HERE}.worker:CachedBreezeTalker"},
    adapter=f"{_HERE}.adapter:CachedBreezeTTS2Adapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    offline_part=f"{_HERE}.prompt:BreezePrompts",
    side_files=(
        "config.json",
        f"{CODEC_FOLDER}/config.json",
        f"{CODEC_FOLDER}/model.safetensors",
    ),
    sample_rate_hz=24_000,
    # A tokenizer may or may not mark them as special.
    control=ControlTokens(
        "<ins_bos> <ins_eos> <|AUDIO|> <|audio_eos|> "
        "[S0] [S1] [S2] [S3] [S4] [S5] [S6] [S7] [S8] [S9]"
    ),
    failure_id=3,  # the talker samples 0, which goes on, and the end
    # No request has to resume: the host's scheduler for this model starts a request
    # only when the whole request fits into the KV cache.
    official="the Qwen3 codec of qwen-tts 0.1.1",
    never_run="its talker (the text encoder needs CUDA graphs), a GPU",
)
