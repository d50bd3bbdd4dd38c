"""What one request cannot do to its batch, on the routes and in the pipeline."""

import asyncio
import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.families.omnivoice.test_requests import SPOKEN
from tests.families.serving import ann, message
from tests.real_pipeline import batch
from tests.speaking import data_url

TEXT = "The keeper counts the ships."


@pytest.mark.parametrize("seed", ["abc", 1.5, 10**30])
@torch.inference_mode()
def test_a_seed_that_is_none_fails_alone(pipeline, seed):
    request = batch({"input": TEXT}, {"input": TEXT})
    request.requests[0].sampling_params.extra_args = {"seed": seed}
    failed, spoken = pipeline.forward(request)
    assert failed.error and spoken.error is None


@pytest.mark.parametrize("num_steps", [0, -1, 10**9])
@torch.inference_mode()
def test_steps_that_end_nothing_or_never_are_an_error(pipeline, num_steps):
    request = batch({"input": TEXT}, num_inference_steps=num_steps)
    (output,) = pipeline.forward(request)
    assert "num_inference_steps" in output.error


HOSTILE = (
    {"seed": "abc"},
    {"seed": 10**30},
    {"num_inference_steps": 0},
    {"num_inference_steps": 10**9},
    {"num_inference_steps": float("inf")},
    {"guidance_scale": float("nan")},
    {"guidance_scale": 1e308},
    {"guidance_scale": -1},
    {"guidance_scale": [2.0]},
    {"flow_shift": "x"},
    {"flow_shift": [1]},
    {"flow_shift": {}},
    {"flow_shift": float("nan")},
    {"sample_solver": {"a": 1}},
    {"sample_solver": "x" * 65},
)


TOO_MUCH = (
    {"input": "word " * 200_000},
    {"ref_text": "<|text_end|>"},
    {"instructions": "low " * 99_999},
)


async def test_parameters_and_texts_that_are_none_or_too_much_are_refused(server):
    for extra in HOSTILE:
        answer = await server.client.post(
            "/v1/audio/speech",
            content=json.dumps({"input": TEXT, "extra_params": extra}),
            headers={"Content-Type": "application/json"},
        )
        assert "extra_params" in message(answer), extra
    for fields in TOO_MUCH:
        assert next(iter(fields)) in message(await server.speak(**fields))
    assert server.engine.prompts == []


async def test_no_request_is_kept_by_what_the_host_begins_beside_it(server):
    """The host starts its task for all answers within the first request."""
    generate, begun = server.engine.generate, []

    def beginning(**given):
        begun.append(asyncio.create_task(asyncio.sleep(60)))
        return generate(**given)

    server.engine.generate = beginning
    answer = await server.speak(ref_audio=data_url(), ref_text=SPOKEN)
    assert answer.status_code == 200
    kept = num_requests()
    for task in begun:
        task.cancel()
    await asyncio.wait(begun)
    begun.clear()
    assert num_requests() == kept


def num_requests():
    gc.collect()
    names = (type(each).__name__ for each in gc.get_objects())
    return sum(name == "OpenAICreateSpeechRequest" for name in names)


async def test_a_client_that_leaves_while_its_voice_is_encoded_is_counted_down(server):
    from vllm_omni.entrypoints.openai import api_server
    from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

    state = server.app.state
    state.enable_server_load_tracking, state.server_load_metrics = True, 0
    await ann(server, ref_text=SPOKEN)
    server.encoders[0].gate.clear()
    request = OpenAICreateSpeechRequest(input=TEXT, voice="Ann")
    raw = SimpleNamespace(app=server.app, headers={}, state=SimpleNamespace())
    route: Any = api_server.create_speech
    speaking = asyncio.create_task(route.__wrapped__(request, raw))
    assert await asyncio.to_thread(server.encoders[0].entered.wait, 20)
    speaking.cancel()
    await asyncio.wait([speaking])
    assert state.server_load_metrics == 0
