"""What we hook into of the host's diffusion side is there, as we take it for granted.

A failure names the seam: see `entrypoints.diffusion` and `model_executor.pipeline`.
"""

import ast
import inspect

import pytest

from tests.host_source import (
    FUNCTIONS,
    calls_in,
    class_in,
    definition,
    method_in,
    parameters,
)
from tests.host_source import source as source_of

SERVING = "entrypoints/openai/serving_speech.py"
WORKER = "diffusion/worker/diffusion_worker.py"
ENGINE = "diffusion/diffusion_engine.py"
SPEECH = ("OmniOpenAIServingSpeech", "_create_diffusion_speech")


def test_seam_serving_a_diffusion_model_is_served_by_one_method_without_an_adapter():
    method = method_in(SERVING, *SPEECH)
    assert parameters(method) == ["request"]
    body = source_of(SERVING, "OmniOpenAIServingSpeech", "create_speech")
    assert "return await self._create_diffusion_speech(request)" in body
    adapter = source_of(SERVING, "OmniOpenAIServingSpeech", "_get_tts_adapter")
    assert "if self._diffusion_mode:\n        return None" in adapter


def test_seam_serving_the_prompt_is_given_to_the_engine_by_name():
    (call,) = calls_in(SERVING, *SPEECH, "self._diffusion_engine.generate")
    given = {keyword.arg for keyword in call.keywords}
    assert not call.args
    assert {"prompt", "request_id", "sampling_params_list"} <= given


def test_seam_serving_a_request_without_a_speaker_brings_none():
    body = source_of(SERVING, *SPEECH)
    assert "if request.ref_audio:" in body and "if request.ref_text:" in body
    assert "if request.voice:" in body


def test_seam_serving_the_engine_is_known_before_the_speaker_storage_is_opened():
    body = source_of(SERVING, "OmniOpenAIServingSpeech", "for_diffusion")
    engine = body.index("instance._diffusion_engine = diffusion_engine")
    assert engine < body.index("instance._init_speaker_storage()")
    assert "instance._diffusion_mode = True" in body[:engine]


def test_seam_serving_a_values_error_is_a_400_and_another_a_500():
    handlers = [
        ast.unparse(handler.type)
        for node in ast.walk(method_in(SERVING, *SPEECH))
        if isinstance(node, ast.Try)
        for handler in node.handlers
        if handler.type is not None
    ]
    assert handlers[:4] == [
        "asyncio.CancelledError",
        "(EngineGenerateError, EngineDeadError)",
        "ValueError",
        "Exception",
    ]


def test_seam_engine_an_output_with_an_error_is_raised_as_one_of_that_request():
    body = source_of(ENGINE, "DiffusionEngine", "postprocess_output")
    assert "raise RuntimeError(output.error)" in body


def test_seam_engine_an_rpc_runs_between_batches_on_the_engines_thread():
    body = source_of(ENGINE, "DiffusionEngine", "_busy_loop")
    assert body.count("self._process_rpc_queue()") == 2


def test_seam_registry_a_pipeline_is_replaced_by_the_hosts_own_hook():
    from vllm_omni.diffusion import registry

    takes = list(inspect.signature(registry.register_diffusion_model).parameters)
    assert takes[:3] == ["model_arch", "module_name", "class_name"]


@pytest.mark.parametrize("name", ["sleep", "wake_up"])
def test_seam_worker_has_its_own_sleep_and_none_of_our_methods(name):
    from vllm_tts_cache.model_executor import worker_methods

    body = class_in(WORKER, "DiffusionWorker").body
    assert definition(body, name, FUNCTIONS) is not None
    for method in worker_methods.METHODS:
        assert definition(body, method.__name__, FUNCTIONS) is None
