"""What the generic parts need to know of VoxCPM2."""

from vllm_tts_cache import stage_configs
from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import ControlTokens, Family, Mode, Transcript

# Two encoders, since the side on which a clip is filled up changes every frame.
REFERENCE_ENCODER = "reference"
CONTINUATION_ENCODER = "continuation"

ARCHITECTURE = "voxcpm2"
REFERENCE = Mode(
    name="reference", encoders=(REFERENCE_ENCODER,), transcript=Transcript.UNUSED
)
CONTINUATION = Mode(
    name="continuation",
    encoders=(CONTINUATION_ENCODER,),
    transcript=Transcript.REQUIRED,
)
_HERE = "vllm_tts_cache.families.voxcpm2"

FAMILY = Family(
    name="voxcpm2",
    short_name="voxcpm2",
    title="VoxCPM2",
    modes=(REFERENCE, CONTINUATION),
    # Its config.json has no model_type; host and official package read this field.
    recognises=lambda model_dir: config_says(model_dir, "architecture", ARCHITECTURE),
    models={
        "VoxCPM2TalkerForConditionalGeneration": f"{_HERE}.worker:CachedVoxCPM2Talker"
    },
    waits_for_outputs_of="voxcpm2",
    adapter=f"{_HERE}.adapter:CachedVoxCPM2Adapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    offline_part=f"{_HERE}.prompt:VoxCPM2Prompts",
    tiny_part=f"{_HERE}.tiny:write",
    deploy_file=stage_configs.FOLDER / "voxcpm2_cpu.yaml",
    side_files=("config.json", ("audiovae.safetensors", "audiovae.pth")),
    sample_rate_hz=48_000,
    # The host removes one <s> when it counts positions, and one more when it makes
    # them: a text that begins with it would end the engine.
    control=ControlTokens(
        "<s> </s> <|audio_start|> <|audio_end|> "
        "<|audio_prompt_start|> <|audio_prompt_end|>"
    ),
    needs_first_runner=True,  # 0.32's second runner counts rows that we pass over
    failure_id=3,  # only 0, go on, and 1, stop, are ever sampled
    # A preempted request does not resume: only the worker knows what it built positions
    # of, and a prompt that continues with outputs is longer than the one it built.
    # As in stock, a request selects continuation, by its own transcript.
    stored_transcript_selects=False,
    official="voxcpm 2.0.3",
    never_run="a released checkpoint, a GPU",
)
