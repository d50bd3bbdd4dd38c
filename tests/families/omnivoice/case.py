"""OmniVoice in the shared tests."""

import json

from tests.families.cases import Case
from vllm_tts_cache.families.omnivoice.family import FAMILY, IN_CONTEXT


def hf_config(checkpoint):
    from vllm_omni.transformers_utils.configs.omnivoice import OmniVoiceConfig

    return OmniVoiceConfig(**json.loads((checkpoint / "config.json").read_text()))


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "dit",
        "model_arch": "OmniVoicePipeline",
        "worker_type": "diffusion",
    },
    hf_config=hf_config,
    mode_of=lambda _info: IN_CONTEXT,
    second_server={"stage_0": {"distributed_executor_backend": "uni"}},
    does=frozenset({"diffusion"}),
)
