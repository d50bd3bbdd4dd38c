"""Attaches our parts to the host's API process, and to its synchronous engine."""

from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute

from vllm_tts_cache import Patch, patch_once
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.speaker.family import families

# What of the host we replace in the API process.
PATCHES = (
    Patch(
        "vllm_omni.entrypoints.openai.api_server",
        "OmniOpenAIServingSpeech OmniStreamingSpeechHandler",
        "Speakers come from the catalogue, and are their tenant's.",
        until="the host lets a plugin name its serving classes",
    ),
    Patch(
        "vllm_omni.entrypoints.openai.api_server",
        "serve_http",
        "The host stops its engine before its requests have ended, bounds no header, "
        "and opens routes to tenants that do not know of tenants.",
        until="the host drains its requests first, bounds heads and can close routes",
    ),
    Patch(
        "vllm_omni.engine.orchestrator.OrchestratorBase",
        "_handle_collective_rpc",
        "The host calls workers one by one, without a timeout: one in a long step, or "
        "on a machine that is gone, holds up requests that have nothing to do with it.",
        until="the host applies calls' timeouts, and handles messages beside them",
    ),
    Patch(
        "vllm_omni.engine.orchestrator.OrchestratorBase",
        "_dispatch_or_fail_request",
        "A request that cannot be sent, as one with half a surrogate pair, ends the "
        "host's engine.",
        until="the host fails it alone, as where numbers are too large",
    ),
    Patch(
        "vllm_omni.engine.async_omni_engine.AsyncOmniEngine",
        "_create_orchestrator",
        "The host looks for outputs every millisecond, a fifth of a core. It can wait "
        "for them, and does so for Qwen3-TTS only; our families are tested with it.",
        until="0.32, which waits by itself",
    ),
    Patch(
        "vllm_omni.entrypoints.async_omni.AsyncOmni",
        "generate shutdown",
        "Other routes hand on to a talker what only adapters may set; `shutdown` is "
        "replaced for the same reason as `serve_http`.",
        until="the host checks what its chat hands on, and drains its requests",
    ),
    Patch(
        "vllm_omni.entrypoints.omni.Omni",
        "collective_rpc",
        "Offline jobs call workers too, and the host has that on AsyncOmni only.",
        until="the host's synchronous engine has it",
    ),
)


def attach() -> None:
    """Put our serving classes, adapters and routes in place of the host's.

    The API server looks its classes up by name when it starts, which is after general
    plugins ran. Called again, it changes nothing.

    Raises: ConfigError.
    """
    from vllm_omni.engine import orchestrator
    from vllm_omni.engine.async_omni_engine import AsyncOmniEngine
    from vllm_omni.engine.orchestrator import OrchestratorBase
    from vllm_omni.entrypoints.openai import api_server, tts_adapters

    from vllm_tts_cache.entrypoints.features import defaults, similarity, usage, webhook
    from vllm_tts_cache.entrypoints.http import page
    from vllm_tts_cache.entrypoints.serving import host_fixes
    from vllm_tts_cache.entrypoints.serving.serving import CachedServingSpeech
    from vllm_tts_cache.entrypoints.serving.websocket import CachedStreamingSpeech
    from vllm_tts_cache.tenants import TenantKeys

    if issubclass(api_server.OmniOpenAIServingSpeech, CachedServingSpeech):
        return

    class ServingSpeech(
        defaults.Speech, usage.Speech, similarity.Speech, webhook.Speech
    ):
        """The serving class with what features add; each is cut with its name here."""

    settings = load_settings()
    # Read here, so that an error in the file is raised before the model is loaded.
    TenantKeys(settings.tenants_file)

    def serving(host: Any) -> Any:
        stopping_well = host_fixes.stopping_well(host, settings.drain_seconds)
        has_tenants = settings.tenants_file is not None
        return host_fixes.guarding(stopping_well, has_tenants=has_tenants)

    host_fixes.quiet_failed_requests()
    patch_once(OrchestratorBase, "_handle_collective_rpc", host_fixes.calling_beside)
    patch_once(OrchestratorBase, "_dispatch_or_fail_request", host_fixes.failing_alone)
    if hasattr(orchestrator, "_event_driven_orch_default_for_pipeline"):  # until 0.32
        waits = host_fixes.waiting_for_outputs
        patch_once(AsyncOmniEngine, "_create_orchestrator", waits)
    patch_once(api_server, "OmniOpenAIServingSpeech", lambda _: ServingSpeech)
    patch_once(
        api_server, "OmniStreamingSpeechHandler", lambda _: CachedStreamingSpeech
    )
    patch_once(api_server, "serve_http", serving)
    # register_tts_adapter refuses a second owner of a name; the registry is a dict.
    adapters = tts_adapters.TTS_ADAPTER_REGISTRY
    for family in families():
        if not family.pipelines:  # the host has none for them, see `adapter`
            adapter = family.part("adapter")
            adapters[adapter.name] = adapter
    ours = [host_fixes.router, *routers()]
    if settings.web:
        ours.append(page.page_router(page.read_assets()))
    for router in ours:
        for route in router.routes:
            if isinstance(route, APIRoute):
                api_server._remove_route_from_router(
                    api_server.router, route.path, set(route.methods)
                )
        api_server.router.routes.extend(router.routes)  # including builds each anew


def routers() -> tuple[APIRouter, ...]:
    """Return the routers of all our routes but the page's."""
    from vllm_tts_cache.entrypoints.features import open_webui, speech_formats, usage
    from vllm_tts_cache.entrypoints.http import clips, voices
    from vllm_tts_cache.entrypoints.serving import speech_routes

    ours = voices, clips, speech_routes, speech_formats, open_webui, usage
    return *(each.router for each in ours), speech_formats.vapi_router


def attach_offline() -> None:
    """Give the host's synchronous engine ``collective_rpc``, unless it has its own.

    vLLM-Omni 0.30 has it on ``AsyncOmni`` only.
    """
    from vllm_omni.entrypoints.omni import Omni

    def collective_rpc(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.engine.collective_rpc(method, *args, **kwargs)

    if not hasattr(Omni, "collective_rpc"):
        Omni.collective_rpc = collective_rpc  # pyright: ignore[reportAttributeAccessIssue]
