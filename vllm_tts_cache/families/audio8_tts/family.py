"""What the generic parts need to know of Audio8 TTS."""

from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import Family, Mode, Transcript

CODEC = "codec"

MODEL_TYPE = "arktts"
IN_CONTEXT = Mode(name="in_context", encoders=(CODEC,), transcript=Transcript.REQUIRED)
_HERE = "vllm_tts_cache.families.audio8_tts"

FAMILY = Family(
    name="audio8_tts",
    short_name="audio8",
    title="Audio8 TTS",
    modes=(IN_CONTEXT,),
    recognises=lambda model_dir: config_says(model_dir, "model_type", MODEL_TYPE),
    models={
        "Audio8TTSSlowARForConditionalGeneration": (
            f"{_HERE}.worker:CachedAudio8SlowAR"
        )
    },
    adapter=f"{_HERE}.adapter:CachedAudio8TTSAdapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    offline_part=f"{_HERE}.prompt:Audio8Prompts",
    side_files=("config.json", "codec.pth"),
    sample_rate_hz=44_100,
    failure_id=3071,  # a text id: the slow AR masks all of those
    needs_first_runner=True,  # the second runner uses its own sampler only
    # A preempted request does not resume: the host drops spoken frames' residual codes.
    official="the host's own codec encoder",
    never_run="a whole server (the codec has its released size only), a GPU",
)
