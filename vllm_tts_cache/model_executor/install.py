"""Attaches our parts to the host's workers and model registry."""

_OURS = "vllm_tts_cache.model_executor"
_MODELS = {
    "Qwen3TTSTalkerForConditionalGeneration": f"{_OURS}.qwen3_tts:CachedQwen3TTSTalker",
    "FishSpeechSlowARForConditionalGeneration": (
        f"{_OURS}.fish_speech:CachedFishSpeechSlowAR"
    ),
    "FishSpeechDACDecoder": f"{_OURS}.fish_speech_codec:CachedFishSpeechDACDecoder",
}


def install() -> None:
    """Replace the host's models by ours, add the worker RPC, hook the scheduler."""
    from vllm_omni.model_executor.models.registry import OmniModelRegistry
    from vllm_omni.worker.mixins import OmniWorkerMixin

    from vllm_tts_cache.model_executor import rpc, scheduler

    for architecture, ours in _MODELS.items():
        OmniModelRegistry.register_model(architecture, ours)
    # Every vLLM-Omni worker inherits this mixin, so neither a deploy file nor the
    # user's own --worker-extension-cls has to name us.
    for method in rpc.METHODS:
        setattr(OmniWorkerMixin, method.__name__, method)
    scheduler.install()
