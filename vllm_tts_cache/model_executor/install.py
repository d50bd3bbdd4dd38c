"""Attaches our parts to the host's workers and model registry."""

from vllm_tts_cache.speaker.listing import families


def install() -> None:
    """Replace the host's models by ours, add the worker RPC, hook the scheduler."""
    from vllm_omni.model_executor.models.registry import OmniModelRegistry
    from vllm_omni.worker.mixins import OmniWorkerMixin

    from vllm_tts_cache.model_executor import rpc, scheduler, sleep

    for family in families():
        for architecture, ours in family.models.items():
            OmniModelRegistry.register_model(architecture, ours)
    # Every vLLM-Omni worker inherits this mixin, so neither a deploy file nor the
    # user's own --worker-extension-cls has to name us.
    for method in rpc.METHODS:
        setattr(OmniWorkerMixin, method.__name__, method)
    sleep.install()
    scheduler.install()
