"""What we hook into, or take for granted, is there in the installed host.

The host's classes are read as source where another test of this process may have
put ours in their place. A failure names the seam: see the module that it names.
"""

import ast
import inspect
from typing import Any

import pytest
from fastapi.routing import APIRoute

from tests.host_source import (
    FUNCTIONS,
    bases_of,
    class_in,
    code_of,
    definition,
    host_dir,
    method_in,
    parameters,
    tree_of,
)

SERVING = "entrypoints/openai/serving_speech.py"
STREAM = "entrypoints/openai/serving_speech_stream.py"
API_SERVER = "entrypoints/openai/api_server.py"
SCHEDULER = "core/sched/omni_ar_scheduler.py"


@pytest.mark.parametrize(
    ("path", "worker"),
    [
        ("worker/gpu_ar_worker.py", "GPUARWorker"),
        ("worker/gpu_generation_worker.py", "GPUGenerationWorker"),
    ],
)
def test_seam_worker_rpc_every_worker_inherits_the_mixin(path, worker):
    class_in("worker/mixins.py", "OmniWorkerMixin")
    assert "OmniWorkerMixin" in bases_of(path, worker), f"{worker} lost OmniWorkerMixin"


def test_seam_worker_rpc_our_methods_collide_with_none_of_the_hosts():
    from vllm_tts_cache.model_executor import rpc_methods

    for path in ("worker/mixins.py", "worker/base.py", "worker/gpu_ar_worker.py"):
        for method in rpc_methods.METHODS:
            assert f"def {method.__name__}(" not in code_of(path), method.__name__


def test_seam_worker_rpc_the_engine_client_takes_what_we_give():
    given = parameters(
        method_in("entrypoints/async_omni.py", "AsyncOmni", "collective_rpc")
    )
    assert given == ["method", "timeout", "args", "kwargs", "stage_ids"], given


async def test_seam_worker_rpc_a_workers_exception_is_an_answer():
    from vllm_omni.engine.stage_pool import StagePool

    class FailingClient:
        stage_type = "llm"

        async def collective_rpc_async(self, **_):
            raise RuntimeError("broken")

    pool: Any = StagePool.__new__(StagePool)
    pool.stage_id, pool.clients = 0, [FailingClient(), None]
    for replica, error in enumerate(("broken", "stage 0 replica 1 is not attached")):
        answer = await pool.collective_rpc(replica, "tts_cache_stats")
        assert answer == {"supported": False, "error": error}


def test_seam_scheduler_the_hooked_method_is_inherited_where_we_expect_it():
    name = "_update_request_with_output"
    defined = definition(class_in(SCHEDULER, "OmniARScheduler").body, name, FUNCTIONS)
    assert defined is None, f"OmniARScheduler defines {name}: our hook would hide it"
    assert "OmniARScheduler" in bases_of(SCHEDULER, "OmniARAsyncScheduler"), (
        "OmniARAsyncScheduler is no OmniARScheduler: our hook does not reach it"
    )
    own = class_in(SCHEDULER, "OmniARAsyncScheduler").body
    assert definition(own, name, FUNCTIONS) is None, (
        f"OmniARAsyncScheduler defines {name}: our hook does not reach it"
    )


def test_seam_scheduler_a_request_can_end_as_an_error_with_a_reason():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    given = list(inspect.signature(Scheduler._update_request_with_output).parameters)
    assert given[:3] == ["self", "request", "new_token_ids"], given
    assert RequestStatus.is_finished(RequestStatus.FINISHED_ERROR)


@pytest.mark.parametrize(
    "serving", ["OmniOpenAIServingSpeech", "OmniStreamingSpeechHandler"]
)
def test_seam_serving_class_is_looked_up_by_name_when_the_server_starts(serving):
    uses = [
        node.lineno
        for function in tree_of(API_SERVER).body
        if isinstance(function, FUNCTIONS)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == serving
    ]
    assert uses, f"api_server.{serving} is not looked up as a global"


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("handle_session", ["websocket"]),
        ("_parse_message", ["websocket", "raw"]),
        ("_send_error", ["websocket", "message"]),
    ],
)
def test_seam_streaming_handler_has_what_ours_builds_on(name, takes):
    method = method_in(STREAM, "OmniStreamingSpeechHandler", name)
    assert parameters(method)[: len(takes)] == takes, name


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("__init__", None),
        ("_restore_uploaded_speakers", []),
        ("_get_available_speakers", []),
        ("_drop_shadowing_uploads", []),
        ("_get_tts_adapter", []),
        ("_load_uploaded_audio", ["voice_name"]),
        ("_get_uploaded_speaker_embedding", ["voice_name"]),
        ("shutdown", []),
        (
            "_prepare_speech_generation",
            ["request", "request_id", "has_inline_ref_audio", "arrival_time"],
        ),
    ],
)
def test_seam_serving_class_has_the_methods_that_we_override_or_call(name, takes):
    method = method_in(SERVING, "OmniOpenAIServingSpeech", name)
    if takes is not None:
        assert parameters(method) == takes, f"OmniOpenAIServingSpeech.{name}"


def test_seam_routes_a_stock_route_is_taken_off_by_path_and_methods():
    from vllm_omni.entrypoints.openai import api_server

    given = list(inspect.signature(api_server._remove_route_from_router).parameters)
    assert given == ["router", "path", "methods"], "_remove_route_from_router"


def stock_routes():
    """``(method, path)`` of every decorated handler, and the handlers' names."""
    for function in tree_of(API_SERVER).body:
        if not isinstance(function, FUNCTIONS):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and decorator.args:
                method = ast.unparse(decorator.func).removeprefix("router.").upper()
                yield (method, ast.literal_eval(decorator.args[0])), function.name


@pytest.mark.parametrize(
    "route",
    [
        ("GET", "/v1/audio/voices"),
        ("POST", "/v1/audio/voices"),
        ("DELETE", "/v1/audio/voices/{name}"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/audio/speech/batch"),
        ("WEBSOCKET", "/v1/audio/speech/stream"),
    ],
)
def test_seam_routes_stock_has_what_we_replace_or_build_on(route):
    assert route in dict(stock_routes()), f"stock has no {route}"


def test_seam_routes_stock_has_no_other_route_where_ours_are():
    from vllm_tts_cache.entrypoints.http import voices

    ours = {
        (method, route.path)
        for route in voices.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    voices = {
        route for route in dict(stock_routes()) if route[1].startswith("/v1/audio/voi")
    }
    assert voices <= ours, f"stock's {voices - ours} would bypass our registry"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/audio/speech", "create_speech"),
        ("/v1/audio/speech/batch", "create_speech_batch"),
    ],
)
def test_seam_routes_the_speech_handlers_can_be_called(path, name):
    assert dict(stock_routes())["POST", path] == name
    function = definition(tree_of(API_SERVER).body, name, FUNCTIONS)
    assert function is not None
    assert parameters(function) == ["request", "raw_request"], name


def test_seam_serving_class_is_made_where_an_event_loop_runs():
    made_by = {
        function.name
        for function in tree_of(API_SERVER).body
        if isinstance(function, ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == "OmniOpenAIServingSpeech"
    }
    assert "omni_init_app_state" in made_by, "our background task needs a loop"


def test_seam_media_connector_fetches_for_an_io_of_ours():
    from vllm.multimodal.media import MediaConnector
    from vllm.multimodal.media.base import MediaIO

    given = list(inspect.signature(MediaConnector.load_from_url_async).parameters)
    assert given[:3] == ["self", "url", "media_io"], "load_from_url_async"
    fields = inspect.signature(MediaConnector).parameters
    assert {"allowed_local_media_path", "allowed_media_domains"} <= set(fields)
    needed = {"load_bytes", "load_base64", "load_file"}
    assert MediaIO.__abstractmethods__ == needed, "MediaIO wants other methods"
    assert "get_max_bytes" in vars(MediaIO), "downloads are not bounded any more"


def test_seam_platform_a_cpu_can_be_added_from_outside():
    from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

    from vllm_tts_cache.platforms.cpu import CPUOmniPlatform

    assert OmniPlatformEnum.OOT, "OmniPlatformEnum.OOT"
    needed = {
        name
        for name in vars(CPUOmniPlatform)
        if not name.startswith("_") and name != "device_name"
    }
    # For the rest the host asks torch's module of the device; the CPU's has none of it.
    platform = "current_omni_platform"
    sources = (host_dir() / "diffusion").rglob("*.py")
    asked = "".join(path.read_text() for path in sources)
    unknown = {
        name
        for name in needed - set(dir(OmniPlatform))
        if f"{platform}.{name}(" not in asked
    }
    assert not unknown
