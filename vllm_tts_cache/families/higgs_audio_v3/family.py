"""What the generic parts need to know of Higgs Audio v3."""

from vllm_tts_cache import stage_configs
from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import Family, Mode, Transcript

CODEC = "codec"

MODEL_TYPE = "higgs_multimodal_qwen3"
IN_CONTEXT = Mode(
    name="in_context",
    encoders=(CODEC,),
    transcript=Transcript.USED,
)
_HERE = "vllm_tts_cache.families.higgs_audio_v3"
_TALKER = f"{_HERE}.worker:CachedHiggsAudioV3Talker"

FAMILY = Family(
    name="higgs_audio_v3",
    short_name="higgs",
    title="Higgs Audio v3",
    modes=(IN_CONTEXT,),
    recognises=lambda model_dir: config_says(model_dir, "model_type", MODEL_TYPE),
    models={
        "HiggsAudioV3TalkerForConditionalGeneration": _TALKER,
        # As its config.json calls it.
        "HiggsMultimodalQwen3ForConditionalGeneration": _TALKER,
    },
    waits_for_outputs_of="higgs_multimodal_qwen3",
    adapter=f"{_HERE}.adapter:CachedHiggsAudioV3Adapter",
    encoders_part=f"{_HERE}.encoders:load_reference_encoders",
    offline_part=f"{_HERE}.offline:HiggsAudioV3Prompts",
    tiny_part=f"{_HERE}.tiny:TINY",
    deploy_file=stage_configs.FOLDER / "higgs_audio_v3_cpu.yaml",
    side_files=("config.json",),
    sample_rate_hz=24_000,
    failure_id=3071,  # a text id: the talker samples <|audio|> and the end only
    # The second does not say whose the rows of a step are, and has its own sampler.
    needs_first_runner=True,
    # It does not resume: the frames that were spoken are kept for the next step only,
    # and a prefill that goes on with them would take them for so many <|audio|>.
    official="the tokenizer of transformers 5.14, behind librosa 0.11",
    shares_kv=True,
    never_run="a released checkpoint, a GPU",
)
