"""What we hook into, or take for granted, is there in the installed host.

The host's classes are read as source where another test of this process may have
put ours in their place. A failure names the seam: see the module that it names.
"""

import ast
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

OMNI = "vllm_omni"
SERVING = "entrypoints/openai/serving_speech.py"
STREAM = "entrypoints/openai/serving_speech_stream.py"
API_SERVER = "entrypoints/openai/api_server.py"
ADAPTERS = "entrypoints/openai/tts_adapters"
SCHEDULER = "core/sched/omni_ar_scheduler.py"
TALKER = "model_executor/models/qwen3_tts/qwen3_tts_talker.py"


@cache
def host_dir(package=OMNI):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def text_of(path, package=OMNI):
    return (host_dir(package) / path).read_text()


@cache
def tree_of(path, package=OMNI):
    return ast.parse(text_of(path, package))


def code_of(path, package=OMNI):
    """Its code as Python spells it, however it is formatted."""
    return ast.unparse(tree_of(path, package))


def definition(body, name, kinds):
    """The last one wins, as when Python runs it."""
    found = [node for node in body if isinstance(node, kinds) and node.name == name]
    return found[-1] if found else None


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def class_in(path, name, package=OMNI):
    node = definition(tree_of(path, package).body, name, (ast.ClassDef,))
    assert node is not None, f"seam {path}: class {name} is gone"
    return node


def bases_of(path, name):
    return [ast.unparse(base) for base in class_in(path, name).bases]


def method_in(path, class_name, name):
    node = definition(class_in(path, class_name).body, name, FUNCTIONS)
    assert node is not None, f"seam {path}: {class_name}.{name} is gone"
    return node


def parameters(function):
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return [argument.arg for argument in every if argument.arg != "self"]


def source(path, class_name, name):
    return ast.unparse(method_in(path, class_name, name))


def test_seam_model_registry_a_class_is_replaced_under_its_name():
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    given = list(inspect.signature(OmniModelRegistry.register_model).parameters)
    assert given == ["model_arch", "model_cls"], "OmniModelRegistry.register_model"
    known = OmniModelRegistry.get_supported_archs()
    assert "Qwen3TTSTalkerForConditionalGeneration" in known, "the talker's name"


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
    from vllm_tts_cache.model_executor import rpc

    for path in ("worker/mixins.py", "worker/base.py", "worker/gpu_ar_worker.py"):
        for method in rpc.METHODS:
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
    body = source(SCHEDULER, "OmniARScheduler", "update_from_output")
    assert f"self.{name}(request, new_token_ids)" in body, f"{name} is not called"


def test_seam_scheduler_a_request_can_end_as_an_error_with_a_reason():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    given = list(inspect.signature(Scheduler._update_request_with_output).parameters)
    assert given[:3] == ["self", "request", "new_token_ids"], given
    assert RequestStatus.is_finished(RequestStatus.FINISHED_ERROR)
    body = source(SCHEDULER, "OmniARScheduler", "update_from_output")
    assert "request.status = RequestStatus.FINISHED_ERROR" in body, (
        "the host itself does not end requests this way any more"
    )


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


def test_seam_serving_class_opens_its_storage_where_we_replace_it():
    body = source(SERVING, "OmniOpenAIServingSpeech", "_init_speaker_storage")
    memo = body.index("self._ref_audio_data_url_cache")
    assert memo < body.index("self._restore_uploaded_speakers()"), (
        "the memo is made after the storage is opened: NoMemo would be overwritten"
    )


@pytest.mark.parametrize(
    "name",
    ["_media_connector", "_diffusion_mode", "_adapter", "_speech_output_policies"],
)
def test_seam_serving_class_has_the_fields_that_we_read(name):
    assert f"self.{name}" in code_of(SERVING), f"OmniOpenAIServingSpeech.{name} is gone"


def test_seam_serving_class_answers_an_error_event_as_we_parse_it():
    body = source(SERVING, "OmniOpenAIServingSpeech", "_generate_audio_sse_events")
    assert "event: speech.audio.error\\ndata: " in body, "SSE error event"


def test_seam_routes_a_stock_route_is_taken_off_by_path_and_methods():
    from vllm_omni.entrypoints.openai import api_server

    given = list(inspect.signature(api_server._remove_route_from_router).parameters)
    assert given == ["router", "path", "methods"], "_remove_route_from_router"
    assert "_remove_route_from_router" in code_of(API_SERVER), "not in api_server"


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
    from vllm_tts_cache.entrypoints import voices

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


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("build", ["request", "sampling_params_list", "has_inline_ref_audio"]),
        ("_build_tts_params", ["request"]),
        ("_estimate_prompt_len", ["tts_params"]),
    ],
)
def test_seam_adapter_has_what_ours_builds_on(name, takes):
    method = method_in(f"{ADAPTERS}/qwen3_tts.py", "Qwen3TTSAdapter", name)
    assert parameters(method) == takes, f"Qwen3TTSAdapter.{name}"


@pytest.mark.parametrize("path", ["qwen3_tts", "fish_speech"])
def test_seam_adapter_is_validated_and_then_built_by_whoever_prepares(path):
    """A request that names a speaker is resolved and validated in `build`."""
    body = source(SERVING, "OmniOpenAIServingSpeech", "_prepare_speech_generation")
    validated = body.index("adapter.validate(request)")
    assert validated < body.index("await adapter.build(request"), "their order"
    name = {"qwen3_tts": "Qwen3TTSAdapter", "fish_speech": "FishSpeechAdapter"}[path]
    for method in ("validate", "build"):
        method_in(f"{ADAPTERS}/{path}.py", name, method)


def test_seam_adapter_registry_is_a_dict_of_classes_by_name():
    from vllm_omni.entrypoints.openai import tts_adapters

    registry = tts_adapters.TTS_ADAPTER_REGISTRY
    assert isinstance(registry, dict), "TTS_ADAPTER_REGISTRY"
    assert "qwen3_tts" in registry, "qwen3_tts is not in TTS_ADAPTER_REGISTRY"
    assert registry["qwen3_tts"].name == "qwen3_tts"


def test_seam_adapter_estimates_in_a_thread_under_this_name():
    body = source(f"{ADAPTERS}/qwen3_tts.py", "Qwen3TTSAdapter", "__init__")
    assert "self._estimate_prompt_len_async" in body, "_estimate_prompt_len_async"


def test_seam_adapter_salts_the_prefix_cache_by_the_reference():
    function = definition(
        tree_of(f"{ADAPTERS}/base.py").body, "conditioning_cache_salt", FUNCTIONS
    )
    assert function is not None, "conditioning_cache_salt is gone"
    assert parameters(function) == ["request", "tts_params"]
    assert "ref_audio_cache_key" in ast.unparse(function), "the salt forgot the audio"


def test_seam_adapter_takes_the_announced_length_of_the_codes():
    builder = "model_executor/models/qwen3_tts/prompt_embeds_builder.py"
    name = "estimate_prompt_len_from_additional_information"
    body = source(builder, "Qwen3TTSPromptEmbedsBuilder", name)
    assert "ref_code_length" in body, "ref_code_length is not read any more"


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


TALKER_CLASS = "Qwen3TTSTalkerForConditionalGeneration"


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("__init__", ["vllm_config", "prefix"]),
        ("load_weights", ["weights"]),
        ("preprocess", ["input_ids", "input_embeds"]),
        ("compute_logits", ["hidden_states", "sampling_metadata"]),
        ("set_batch_req_ids", ["req_ids"]),
        ("mrv2_sampling_context", ["req_ids", "num_output_tokens"]),
    ],
)
def test_seam_talker_has_the_methods_that_ours_overrides_or_needs(name, takes):
    assert parameters(method_in(TALKER, TALKER_CLASS, name)) == takes, f"talker.{name}"


@pytest.mark.parametrize(
    "name",
    [
        "_batch_req_ids",
        "_use_v2_model_runner",
        "_tts_pad_embed",
        "_embedding_dtype",
        "talker_config",
        "logitsprocs_need_output_token_ids",
    ],
)
def test_seam_talker_has_the_fields_that_ours_uses(name):
    body = source(TALKER, TALKER_CLASS, "__init__")
    assert f"self.{name}" in body or f"'{name}'" in body, f"talker.{name} is gone"


def test_seam_talker_reads_a_voice_clone_prompt():
    builder = "model_executor/models/qwen3_tts/prompt_embeds_builder.py"
    body = source(builder, "Qwen3TTSPromptEmbedsBuilder", "build_prompt_embeds")
    for name in ("voice_clone_prompt", "ref_spk_embedding", "ref_code", "icl_mode"):
        assert f"'{name}'" in body, f"build_prompt_embeds does not read {name}"


def test_seam_codec_mask_forbids_the_id_that_ends_a_request_without_a_prompt():
    from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import (
        Qwen3TTSTalkerConfig,
    )

    from vllm_tts_cache.model_executor.scheduler import NO_SPEAKER_PROMPT

    config = Qwen3TTSTalkerConfig()
    assert config.vocab_size == NO_SPEAKER_PROMPT + 1, "the talker's vocabulary grew"
    assert config.code_predictor_config.vocab_size == 2048, "codes per codebook"
    body = source(TALKER, TALKER_CLASS, "compute_logits")
    assert "masked_fill(self._codec_disallowed_mask, float('-inf'))" in body, (
        "the codec mask is not applied in compute_logits any more"
    )
    mask = source(TALKER, TALKER_CLASS, "__init__")
    allowed = "min(self._codebook_vocab_size, vocab)"
    assert allowed in mask, "the mask allows other ids than codes and the end"


def test_seam_runner_v1_says_whose_row_is_whose_before_logits_are_computed():
    body = code_of("worker/gpu_ar_model_runner.py")
    told = body.index("set_batch_req_ids(req_ids[:num_reqs])")
    assert told < body.index("self.model.compute_logits("), "set_batch_req_ids"


def test_seam_runner_v2_says_it_only_to_models_that_need_output_token_ids():
    body = code_of("worker_v2/omni_ar_model_runner.py")
    assert "getattr(self.model, 'mrv2_sampling_context', None)" in body
    assert "getattr(self.model, 'logitsprocs_need_output_token_ids', False)" in body, (
        "another condition decides who is told; CachedQwen3TTSTalker.__init__ sets this"
    )
    assert "self.set_batch_req_ids(req_ids)" in source(
        TALKER, TALKER_CLASS, "mrv2_sampling_context"
    )


@pytest.mark.parametrize(
    ("package", "constant", "group"),
    [
        (OMNI, "OMNI_DEFAULT_PLUGINS_GROUP", "vllm_omni.general_plugins"),
        (OMNI, "OMNI_PLATFORM_PLUGINS_GROUP", "vllm_omni.platform_plugins"),
        ("vllm", "DEFAULT_PLUGINS_GROUP", "vllm.general_plugins"),
    ],
)
def test_seam_entry_points_are_read_from_the_groups_that_we_declare(
    package, constant, group
):
    assert f"{constant} = '{group}'" in code_of("plugins/__init__.py", package)


@pytest.mark.parametrize(
    "path",
    ["engine/arg_utils.py", "engine/stage_init_utils.py", "worker/mixins.py"],
)
def test_seam_entry_points_are_loaded_by_api_stages_and_workers(path):
    assert "load_omni_general_plugins()" in code_of(path), f"{path} loads no plugins"


def test_seam_entry_points_an_engine_core_of_its_own_loads_vllms_group():
    assert "load_general_plugins()" in code_of("v1/engine/core.py", "vllm")
    spec = importlib.util.find_spec("vllm_omni.engine.stage_engine_core_proc")
    assert spec is not None, "stage_engine_core_proc: our guard for engine cores"


def test_seam_platform_a_cpu_can_be_added_from_outside():
    from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

    from vllm_tts_cache.platforms.cpu import CPUOmniPlatform

    assert OmniPlatformEnum.OOT, "OmniPlatformEnum.OOT"
    needed = {
        name
        for name in vars(CPUOmniPlatform)
        if not name.startswith("_") and name != "device_name"
    }
    assert needed <= set(dir(OmniPlatform)), (
        f"unknown: {needed - set(dir(OmniPlatform))}"
    )
