"""Outputs of our families reach the API process when they come.

vLLM-Omni 0.30 looks for them every millisecond, which takes a fifth of a core all the
time, and can wait for them instead; it does so by itself for Qwen3-TTS alone. Both ways
hand outputs to the same code, one after another, and know no pipeline: what is special
is only which was validated. For the families whose tests run so we let it. Of a
diffusion stage, OmniVoice's, the host goes on looking for what the stage makes, and no
more for what comes out of it. ``VLLM_OMNI_EVENT_DRIVEN_ORCH`` has the last word, as
before.
"""

from functools import wraps
from typing import Any

from vllm_omni.engine.async_omni_engine import AsyncOmniEngine

from vllm_tts_cache.speaker.family import families

_MARK = "_vllm_tts_cache_waits"


def install() -> None:
    """Have engines of our families wait; again, it changes nothing."""
    host = AsyncOmniEngine._create_orchestrator
    if hasattr(host, _MARK):
        return
    ours = {family.waits_for_outputs_of for family in families()} - {""}

    @wraps(host)
    def create(self: Any, **kwargs: Any) -> Any:
        # Here, as an engine asks what its pipeline's default is before it loads us.
        pipeline = self.pipeline_config
        if pipeline is not None and pipeline.model_type in ours:
            self._event_driven_orch_default = True
            kwargs["event_driven_orch_default"] = True
        return host(self, **kwargs)

    setattr(create, _MARK, True)
    AsyncOmniEngine._create_orchestrator = create
