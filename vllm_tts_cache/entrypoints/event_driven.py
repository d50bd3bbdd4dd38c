"""Outputs of our families reach the API process when they come.

vLLM-Omni 0.30 looks for them every millisecond, which takes a fifth of a core all the
time, and can wait for them instead; it does so by itself for Qwen3-TTS alone. For the
families whose tests run so we let it. ``VLLM_OMNI_EVENT_DRIVEN_ORCH`` has the last
word, as before.
"""

from vllm_omni.engine import omni_engine_base

from vllm_tts_cache.speaker.family import families

_NAME = "_event_driven_orch_default_for_pipeline"


def install() -> None:
    """Have engines of our families wait; again, it changes nothing."""
    host = getattr(omni_engine_base, _NAME)
    if host.__module__ == __name__:
        return
    ours = {family.waits_for_outputs_of for family in families()} - {""}

    def is_default(pipeline_model_type: str | None) -> bool:
        return pipeline_model_type in ours or host(pipeline_model_type)

    setattr(omni_engine_base, _NAME, is_default)
