"""Attaches our parts to the host's API process, and to its synchronous engine."""

from typing import Any, TypeGuard

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from vllm_tts_cache.speaker.family import families


def attach() -> None:
    """Put our serving classes, adapters and routes in place of the host's.

    The API server looks its classes up by name when it starts, which is after general
    plugins ran. Called again, it changes nothing.
    """
    from vllm_omni.entrypoints.openai import api_server, tts_adapters

    from vllm_tts_cache.entrypoints import speech_routes, voices
    from vllm_tts_cache.entrypoints.speech import CachedServingSpeech
    from vllm_tts_cache.entrypoints.speech_stream import CachedStreamingSpeech

    if api_server.OmniOpenAIServingSpeech is CachedServingSpeech:
        return
    api_server.OmniOpenAIServingSpeech = CachedServingSpeech
    api_server.OmniStreamingSpeechHandler = CachedStreamingSpeech
    # register_tts_adapter refuses a second owner of a name; the registry is a dict.
    adapters = tts_adapters.TTS_ADAPTER_REGISTRY
    for family in families():
        if not family.pipelines:  # those have none of the host's, see `diffusion`
            adapter = family.part("adapter")
            adapters[adapter.name] = adapter
    routers = voices.router, speech_routes.speech_router, speech_routes.batch_router
    for router in routers:
        for route in filter(_is_api_route, router.routes):
            api_server._remove_route_from_router(
                api_server.router, route.path, set(route.methods)
            )
        api_server.router.include_router(router)


def _is_api_route(route: BaseRoute) -> TypeGuard[APIRoute]:
    return isinstance(route, APIRoute)


def attach_offline() -> None:
    """Give the host's synchronous engine ``collective_rpc``, unless it has its own.

    vLLM-Omni 0.30 has it on ``AsyncOmni`` only.
    """
    from vllm_omni.entrypoints.omni import Omni

    if not hasattr(Omni, "collective_rpc"):
        Omni.collective_rpc = collective_rpc  # pyright: ignore[reportAttributeAccessIssue]


def collective_rpc(
    self: Any,
    method: str,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    stage_ids: list[int] | None = None,
) -> list[Any]:
    """Call ``method`` on every worker of the stages: a list per replica."""
    return self.engine.collective_rpc(
        method, timeout=timeout, args=args, kwargs=kwargs, stage_ids=stage_ids
    )
