"""What the generic parts need to know of Higgs Audio v3."""

from vllm_tts_cache import stage_configs
from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import ControlTokens, Family, Mode, Transcript

CODEC = "codec"

MODEL_TYPE = "higgs_multimodal_qwen3"
IN_CONTEXT = Mode(name="in_context", encoders=(CODEC,), transcript=Transcript.USED)
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
    offline_part=f"{_HERE}.prompt:HiggsAudioV3Prompts",
    tiny_part=f"{_HERE}.tiny:write",
    deploy_file=stage_configs.FOLDER / "higgs_audio_v3_cpu.yaml",
    side_files=("config.json",),
    sample_rate_hz=24_000,
    # Its tokenizer marks these as special, like the parts of its prompts.
    control=ControlTokens(tags=r"<\|(emotion|env|prosody|sfx|style):\w+\|>"),
    failure_id=3071,  # a text id: the talker samples <|audio|> and the end only
    # The second runner does not name the requests of rows, and uses its own sampler.
    needs_first_runner=True,
    # A preempted request does not resume: the host keeps a spoken frame for the next
    # step only, and a resumed prefill would have rows of plain <|audio|> ids instead.
    official="the tokenizer of transformers 5.14, behind librosa 0.11",
    shares_kv=True,
    never_run="a released checkpoint, a GPU",
)
