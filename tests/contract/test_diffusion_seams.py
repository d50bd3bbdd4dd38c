"""What we hook into of the host's diffusion side is there, as we take it for granted.

A failure names the seam: see `entrypoints.diffusion` and `model_executor.pipeline`.
"""

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

SERVING = "entrypoints/openai/serving_speech.py"
WORKER = "diffusion/worker/diffusion_worker.py"
ENGINE = "diffusion/diffusion_engine.py"
SPEECH = ("OmniOpenAIServingSpeech", "_create_diffusion_speech")


def test_seam_serving_a_diffusion_model_is_served_by_one_method():
    method = method_in(SERVING, *SPEECH)
    assert parameters(method) == ["request"]


def test_seam_serving_the_prompt_is_given_to_the_engine_by_name():
    (call,) = calls_in(SERVING, *SPEECH, "self._diffusion_engine.generate")
    given = {keyword.arg for keyword in call.keywords}
    assert not call.args
    assert {"prompt", "request_id", "sampling_params_list"} <= given


def test_seam_registry_a_pipeline_is_replaced_by_the_hosts_own_hook():
    from vllm_omni.diffusion import registry

    takes = list(inspect.signature(registry.register_diffusion_model).parameters)
    assert takes[:3] == ["model_arch", "module_name", "class_name"]


@pytest.mark.parametrize("name", ["sleep", "wake_up"])
def test_seam_worker_has_its_own_sleep_and_none_of_our_methods(name):
    from vllm_tts_cache.model_executor import rpc_methods

    body = class_in(WORKER, "DiffusionWorker").body
    assert definition(body, name, FUNCTIONS) is not None
    for method in rpc_methods.METHODS:
        assert definition(body, method.__name__, FUNCTIONS) is None
