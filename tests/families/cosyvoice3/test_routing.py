"""Each request speaks with its own voice in the second stage, whoever begins beside it.

Between the stages everything is the host's: what its runner makes of a step's outputs
for each request, what its scheduler hands to the sender, and what that sends. Stock's
own outputs swap the voices of two requests that begin beside a running one.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_omni.data_entry_keys import flatten_payload, unflatten_payload
from vllm_omni.model_executor.models.output_templates import OmniOutput
from vllm_omni.model_executor.stage_input_processors import cosyvoice3 as host
from vllm_omni.utils.mm_outputs import partition_payload_list
from vllm_omni.worker.gpu_ar_model_runner import _ensure_tensor_values

from tests.families.cosyvoice3.voices import Prompts, Request, Voice
from tests.families.runner import parts_of
from vllm_tts_cache.families.cosyvoice3.family import CROSS_LINGUAL, INSTRUCT, ZERO_SHOT
from vllm_tts_cache.speaker.reference import FIELD

CHUNK = 15
SPOKEN_OF = ("speech_token", "speech_feat")
CONNECTOR = SimpleNamespace(
    config={"extra": {"codec_chunk_frames": CHUNK, "codec_vocab_size": 6_561}}
)


@pytest.fixture(scope="module", autouse=True)
def tells_once(talker):
    talker._sends_once = True  # as in a server, whose stage sends in chunks


@pytest.fixture(scope="module")
def voices(talker):
    """Of three lengths: stock pads what it hands on."""
    return [
        Voice(talker, seconds, pitch_hz)
        for seconds, pitch_hz in ((2.0, 220.0), (3.1, 330.0), (4.2, 440.0))
    ]


@pytest.fixture(scope="module")
def ours(own_checkpoint):
    return Prompts(own_checkpoint)


@pytest.fixture
def requests(voices, ours):
    """One of each voice, in zero-shot."""
    return [Request(f"{n}", ours(v, ZERO_SHOT)) for n, v in enumerate(voices)]


def outputs_of(talker, requests):
    """What the runner is given for a step of these requests, in their order."""
    num_rows = len(requests)
    output = talker.make_omni_output(
        torch.zeros(num_rows, 128),
        model_intermediate_buffer=[request.info for request in requests],
        request_token_spans=[(row, row + 1) for row in range(num_rows)],
    )
    assert isinstance(output, OmniOutput)
    return output.multimodal_outputs


def as_sent(multimodal_outputs, num_requests):
    """What the runner makes of it for each request, and the scheduler hands on."""
    parts = parts_of(multimodal_outputs, [1] * num_requests)
    payloads: list[Any] = [flatten_payload(part) for part in parts]
    between, to_clients = partition_payload_list(payloads)
    assert to_clients is None
    return [_ensure_tensor_values(payload or {}) for payload in between or payloads]


class Sender:
    """The host's, of stage 0; what it has sent of each request."""

    def __init__(self):
        self.connector = CONNECTOR
        self.request_payload = {}
        self.sent = {}

    def step(self, name, payload, codes, *, is_finished=False):
        request = SimpleNamespace(
            external_req_id=name,
            output_token_ids=list(codes),
            additional_information=None,
            is_finished=lambda: is_finished,
        )
        sent = host.talker2code2wav_async_chunk(
            self, unflatten_payload(payload), request, is_finished
        )
        if sent is not None and sent.embed is not None:
            assert name not in self.sent, "it is told once"
            self.sent[name] = sent.embed
        return sent


def assert_is(told, voice):
    for name, tensor in voice.used().items():
        assert torch.equal(getattr(told, name), tensor)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_so_it_is_in_any_order_and_in_any_chunks(talker, voices, requests, order):
    """A new request may come before a running one, where another has just ended."""
    sender = Sender()
    running = requests[order[0]]
    running.step(talker)
    (payload,) = as_sent(outputs_of(talker, [running]), 1)
    sender.step(running.name, payload, [])
    steps = dict(zip(order[1:], (17, 40), strict=True))
    while any(requests[n].num_computed < requests[n].num_tokens for n in steps):
        running.step(talker, ids=torch.tensor([7], dtype=torch.int32))
        for index, num_tokens in steps.items():
            left = requests[index].num_tokens - requests[index].num_computed
            if left:
                requests[index].step(talker, min(num_tokens, left))
        for index, payload in enumerate(as_sent(outputs_of(talker, requests), 3)):
            sender.step(f"{index}", payload, [])
    for name in range(3):
        sender.step(f"{name}", {}, range(100))
    for name, voice in enumerate(voices):
        assert_is(sender.sent[f"{name}"], voice)


@pytest.mark.parametrize("mode", [CROSS_LINGUAL, INSTRUCT], ids=lambda mode: mode.name)
def test_what_the_talker_is_not_told_the_decoder_is(talker, voices, ours, mode):
    requests = [Request(f"{n}", ours(v, mode)) for n, v in enumerate(voices)]
    sender = Sender()
    for request in requests:
        request.step(talker)
    for name, payload in enumerate(as_sent(outputs_of(talker, requests), 3)):
        sender.step(f"{name}", payload, range(100))
    for name, voice in enumerate(voices):
        assert_is(sender.sent[f"{name}"], voice)


def test_a_failed_request_is_told_nothing_others_their_own(talker, voices, requests):
    requests[0].info[FIELD] = ["0" * 64, "registered"]
    sender = Sender()
    for request in requests:
        request.step(talker)
    talker._failed_requests._ids.clear()
    for name, payload in enumerate(as_sent(outputs_of(talker, requests), 3)):
        sender.step(f"{name}", payload, [], is_finished=name == 0)
    for name in (1, 2):
        sender.step(f"{name}", {}, range(100))
        assert_is(sender.sent[f"{name}"], voices[name])
    told = sender.sent["0"]
    assert told.speech_token.numel() == told.speech_feat.numel() == 0
    assert not told.embedding.any()


def test_a_voice_is_handed_on_with_the_steps_it_begins_in(talker, voices, requests):
    """A mel of 30 s is half a megabyte, and others begin beside a request often."""
    running, new, _ = requests
    running.step(talker)
    running.step(talker, ids=torch.tensor([5], dtype=torch.int32))
    new.step(talker, 20)
    for _ in range(2):
        made: Any = outputs_of(talker, [running, new])
        told = made["embed"]
        sizes = [[each.numel() for each in told[name]] for name in SPOKEN_OF]
        assert [size for size, _ in sizes] == [0, 0]
        assert [size for _, size in sizes] == [
            voices[1].used()[name].numel() for name in SPOKEN_OF
        ]
        new.step(talker, new.num_tokens - new.num_computed)
        running.step(talker, ids=torch.tensor([6], dtype=torch.int32))


def test_without_chunks_the_decoder_is_told_it(talker, voices, requests, monkeypatch):
    """In the whole-payload mode stock has one request's replaced by another's."""
    monkeypatch.setattr(talker, "_sends_once", False)
    requests[0].step(talker)
    as_sent(outputs_of(talker, requests[:1]), 1)
    requests[0].step(talker, ids=torch.tensor([5], dtype=torch.int32))
    for request in requests[1:]:
        request.step(talker)
    for index, payload in enumerate(as_sent(outputs_of(talker, requests), 3)):
        made: Any = host.text2flow_full_payload(
            None, payload, SimpleNamespace(external_req_id=f"{index}")
        )
        for name, tensor in voices[index].used().items():
            assert np.array_equal(made["embed"][name], tensor)
