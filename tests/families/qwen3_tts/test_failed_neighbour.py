"""A Qwen3 request that fails leaves its neighbours' codec frames alone.

The host joins what each request of a step leaves behind, and cuts it up again for the
next stage: in one way on each of its runners. Both run here over the real talker.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_omni.data_entry_keys import flatten_payload, unflatten_payload
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
    Qwen3TTSTalkerForConditionalGeneration as HostTalker,
)
from vllm_omni.model_executor.stage_input_processors import qwen3_tts as next_stage
from vllm_omni.worker_v2.omni_ar_model_runner import OmniARModelRunner

from tests.families.runner import parts_of
from vllm_tts_cache.speaker.reference import FIELD

NUM_CODES = 16
FRAME, END_OF_SPEECH = 7, 2_150
INFO = {"text": ["Hello there."], "ref_text": ["What is said."], "task_type": ["Base"]}
CHUNKED = pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])


@pytest.fixture
def step(talker, monkeypatch, chunked):
    """What each request of a step hands to the next stage, on either runner."""
    model_config = SimpleNamespace(async_chunk=chunked)
    host: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model_config),
        eager_frames_active=False,  # since 0.32
    )

    def run(cut, left):
        counts = np.array([len(update["codes"]["audio"]) for update in left])
        hidden = torch.zeros(int(counts.sum()), 4)
        infos = [{**INFO, **update, "meta": {**update["meta"]}} for update in left]
        made = HostTalker.make_omni_output(
            host, hidden, model_intermediate_buffer=infos
        )
        return cut(made.multimodal_outputs, counts)

    yield run
    talker._failed_requests._ids.clear()


def cut_by_the_first_runner(outputs, counts):
    return [unflatten_payload(part) for part in parts_of(outputs, counts)]


def cut_by_the_second_runner(outputs, counts):
    starts = np.concatenate([[0], np.cumsum(counts)])
    passed, _ = OmniARModelRunner._build_async_chunk_outputs_from_mm(
        outputs, starts, counts, len(counts), int(counts.sum())
    )
    assert passed is not None
    return [unflatten_payload(dict(payload or {})) for payload in passed]


RUNNERS = pytest.mark.parametrize(
    "cut", [cut_by_the_first_runner, cut_by_the_second_runner], ids=["v1", "mrv2"]
)


def decoding(talker, token_id):
    ids = torch.tensor([token_id])
    *_, (update,) = talker.preprocess_decode_batch(input_ids=ids, req_infos=[INFO])
    meta = {**update["meta"], "ref_code_len": 20}  # kept since its prefill
    codes = torch.full((1, NUM_CODES), FRAME)
    return {"codes": {"audio": codes}, "meta": meta}


def prefilling(talker, num_tokens, *, in_context=True):
    """What the host's own prefill leaves, for a clone."""
    size = talker.config.speaker_encoder_config.enc_dim
    prompt = {"ref_spk_embedding": torch.zeros(size), "icl_mode": in_context}
    if in_context:
        prompt["ref_code"] = torch.zeros((20, NUM_CODES), dtype=torch.long)
    info = {
        **INFO,
        "voice_clone_prompt": [prompt],
        "x_vector_only_mode": [not in_context],
    }
    return preprocess(talker, num_tokens, info)


def failing(talker, num_tokens, buffer=INFO):
    return preprocess(talker, num_tokens, {**buffer, FIELD: ["no such voice"]})


def preprocess(talker, num_tokens, info):
    ids = torch.ones(num_tokens, dtype=torch.long)
    kept = {"request_id": "request", "_omni_is_prefill": True}
    return talker.preprocess(ids, None, **kept, **info)[2]


def frames(passed):
    """Whether the next stage appends each request's last frame to its audio."""
    appended = []
    for payload in passed:
        frame = next_stage._extract_last_frame(payload)
        assert frame is not None
        appended.append(next_stage._should_append_async_frame(payload, frame))
    return appended


@CHUNKED
@RUNNERS
def test_a_speaking_neighbour_keeps_its_frame(talker, step, cut):
    speaks, ends = decoding(talker, FRAME), decoding(talker, END_OF_SPEECH)
    batch = [speaks, ends, failing(talker, 300)]
    assert frames(step(cut, batch)) == [True, False, False]
    assert frames(step(cut, batch[::-1])) == [False, False, True]


@CHUNKED
@RUNNERS
def test_a_starting_neighbour_gets_no_frame_of_zeros(talker, step, cut):
    starts, speaks = prefilling(talker, 40), decoding(talker, FRAME)
    batch = [starts, failing(talker, 300), speaks]
    assert frames(step(cut, batch)) == [False, False, True]


@pytest.mark.parametrize("chunked", [False], ids=["whole"])
@RUNNERS
def test_each_neighbour_keeps_the_length_of_its_own_reference(talker, step, cut):
    speaks, starts = decoding(talker, FRAME), prefilling(talker, 40)
    speaks["meta"]["ref_code_len"] = 31
    passed = step(cut, [starts, speaks, failing(talker, 300)])
    lengths = [payload["meta"]["ref_code_len"] for payload in passed]
    assert [set(length.tolist()) for length in lengths] == [{20}, {31}, {0}]
    counts = [len(payload["meta"]["codec_streaming"]) for payload in passed]
    assert counts == [40, 1, 300]


@pytest.mark.parametrize("in_context", [True, False], ids=["icl", "x-vector"])
def test_a_failed_prefill_leaves_all_that_the_hosts_leaves(talker, in_context):
    def keys(update):
        return set(flatten_payload(update))

    assert keys(failing(talker, 12)) >= keys(
        prefilling(talker, 12, in_context=in_context)
    )
    talker._failed_requests._ids.clear()


def test_a_failed_request_without_a_text_survives_its_next_steps(talker):
    """A later chunk, and the decode step that asynchronous scheduling adds."""
    buffer = failing(talker, 12, {})
    later = failing(talker, 5, buffer)
    assert later["codes"]["audio"].shape == (5, NUM_CODES)
    assert not later["meta"]["codec_frame_valid"]
    ids = torch.tensor([3_071])
    *_, updates = talker.preprocess_decode_batch(input_ids=ids, req_infos=[buffer])
    assert not updates[0]["meta"]["codec_frame_valid"]
    talker._failed_requests._ids.clear()


def test_rows_that_the_host_cannot_read_at_once_are_built_singly(talker, monkeypatch):
    if not hasattr(HostTalker, "preprocess_prefill_rows_mrv2"):
        pytest.skip("since 0.32")
    table = torch.zeros(4, talker.talker_config.hidden_size, dtype=torch.bfloat16)
    builder = talker._prompt_builder
    monkeypatch.setattr(builder, "_projected_text_table", table, raising=False)
    entries = [(0, 4, {"text": ["Hello."], "embed": "x"}), (4, 4, {"text": ["a"]})]
    rows = torch.zeros(8, table.shape[1], dtype=torch.bfloat16)
    ids = torch.zeros(8, dtype=torch.long)
    made = talker.preprocess_prefill_rows_mrv2(
        entries=entries, input_ids=ids, input_embeds=rows
    )
    assert made == [None, None]
