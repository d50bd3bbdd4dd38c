"""What the generic parts need to know of OmniVoice."""

from vllm_tts_cache import stage_configs
from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import ControlTokens, Family, Mode, Transcript

CODEC_ENCODER = "codec"
TOKENIZER = "audio_tokenizer"  # its folder in a checkpoint

MODEL_TYPE = "omnivoice"
# Without a transcript the official package has Whisper write one, which is in no
# checkpoint of OmniVoice. The host leaves the transcript out; whether the model was
# trained for that is not documented.
IN_CONTEXT = Mode(
    name="in_context", encoders=(CODEC_ENCODER,), transcript=Transcript.REQUIRED
)
_HERE = "vllm_tts_cache.families.omnivoice"
_PIPELINE = f"{_HERE}.worker:CachedOmniVoicePipeline"

FAMILY = Family(
    name="omnivoice",
    short_name="omnivoice",
    title="OmniVoice",
    modes=(IN_CONTEXT,),
    recognises=lambda model_dir: config_says(model_dir, "model_type", MODEL_TYPE),
    # A checkpoint's config.json has the second name.
    pipelines={"OmniVoicePipeline": _PIPELINE, "OmniVoice": _PIPELINE},
    waits_for_outputs_of="omnivoice",
    adapter=f"{_HERE}.adapter:CachedOmniVoiceAdapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    offline_part=f"{_HERE}.prompt:OmniVoicePrompts",
    tiny_part=f"{_HERE}.tiny:write",
    deploy_file=stage_configs.FOLDER / "omnivoice_cpu.yaml",
    side_files=(
        "config.json",
        f"{TOKENIZER}/config.json",
        f"{TOKENIZER}/model.safetensors",
    ),
    sample_rate_hz=24_000,
    # The worker alone has the tokenizer.
    control=ControlTokens(
        "<|denoise|> <|lang_start|> <|lang_end|> <|instruct_start|> <|instruct_end|> "
        "<|text_start|> <|text_end|> <|im_start|> <|im_end|> <|endoftext|>"
    ),
    resumes=True,  # without a KV cache no request is preempted
    official="omnivoice 0.2.1",
    never_run="a released checkpoint, a GPU",
)
