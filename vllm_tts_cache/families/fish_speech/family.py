"""What the generic parts need to know of Fish Speech S2 Pro."""

from vllm_tts_cache import stage_configs
from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import Family, Mode, Transcript

CODEC = "codec"
# The official code takes any number. A voice's clips last 30 s at most together, and a
# recording of less than 3 s is worth little as a reference.
MAX_CLIPS = 10

MODEL_TYPE = "fish_qwen3_omni"
IN_CONTEXT = Mode(
    name="in_context",
    encoders=(CODEC,),
    transcript=Transcript.REQUIRED,
    stand_in={"task_type": "Base", "x_vector_only_mode": False},
)
_HERE = "vllm_tts_cache.families.fish_speech"

FAMILY = Family(
    name="fish_speech",
    short_name="fish",
    title="Fish Speech",
    modes=(IN_CONTEXT,),
    recognises=lambda model_dir: config_says(model_dir, "model_type", MODEL_TYPE),
    models={
        "FishSpeechSlowARForConditionalGeneration": (
            f"{_HERE}.worker:CachedFishSpeechSlowAR"
        ),
        "FishSpeechDACDecoder": f"{_HERE}.codec_worker:CachedFishSpeechDACDecoder",
    },
    waits_for_outputs_of="fish_qwen3_omni",
    adapter=f"{_HERE}.adapter:CachedFishSpeechAdapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    offline_part=f"{_HERE}.prompt:FishSpeechPrompts",
    tiny_part=f"{_HERE}.tiny:write",
    deploy_file=stage_configs.FOLDER / "fish_speech_cpu.yaml",
    side_files=("config.json", "codec.pth"),
    sample_rate_hz=44_100,
    max_clips=MAX_CLIPS,
    failure_id=3071,  # a text id: the slow AR masks all of those
    resumes=True,  # see `SpokenFrames`
    official="the host's own codec encoder",
    shares_kv=True,
    never_run="a released checkpoint, a GPU",
)
