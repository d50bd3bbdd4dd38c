"""Our classes in the place of the host's, in both registries that it looks in."""

from vllm.model_executor.models import ModelRegistry
from vllm_omni.engine import arg_utils
from vllm_omni.engine.arg_utils import register_omni_models_to_vllm
from vllm_omni.model_executor.models.registry import OmniModelRegistry

from vllm_tts_cache.speaker.family import families


def install() -> None:
    """Replace what the host has, and again where it registers its own classes later."""
    for family in families():
        for architecture, ours in (*family.models.items(), *family.decoders.items()):
            OmniModelRegistry.register_model(architecture, ours)
    arg_utils.register_omni_models_to_vllm = register_models_to_vllm


def register_models_to_vllm() -> None:
    """Register the host's classes in vLLM's own registry, and ours after them.

    vLLM's configuration, of which the host makes its own, asks there whether a model
    takes multimodal prompts. If one does, it also asks for the class, and what it is
    told is what the process loads.
    """
    register_omni_models_to_vllm()
    for family in families():
        if family.host_is_multimodal:
            for architecture, ours in family.models.items():
                ModelRegistry.register_model(architecture, ours)
