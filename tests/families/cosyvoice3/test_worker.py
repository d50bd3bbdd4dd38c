"""A prefill of CosyVoice3 by content address is the host's by waveform, bit for bit.

Both sides run on the real talker of a tiny checkpoint. The host's side is what it makes
of a batch of one; the other modes, which it lacks, are compared with the official code.
"""

from dataclasses import replace
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

from tests.families.cosyvoice3 import official
from tests.families.cosyvoice3.voices import Prompts, Request, Voice
from tests.families.runner import ABSENT, UNKNOWN, UNNAMED, forced_ids, num_failed
from tests.sampling import drawing, greedy
from vllm_tts_cache.families.cosyvoice3 import prompt as prompts
from vllm_tts_cache.families.cosyvoice3.family import (
    CROSS_LINGUAL,
    FAMILY,
    INSTRUCT,
    ZERO_SHOT,
)
from vllm_tts_cache.families.cosyvoice3.positions import used_tokens
from vllm_tts_cache.speaker.reference import FIELD

CHUNKS = (1, 7, 16, 64)
MODES = pytest.mark.parametrize("mode", FAMILY.modes, ids=lambda mode: mode.name)


@pytest.fixture(autouse=True)
def nothing_happened_before(talker):
    talker._failed_requests._ids.clear()


@pytest.fixture(scope="module")
def ours(own_checkpoint):
    return Prompts(own_checkpoint)


@pytest.fixture(scope="module")
def voice(talker):
    return Voice(talker)


def prefill(talker, prompt, *, chunk=None, name="request", **spoil: Any):
    """The rows of a prefill, in chunks, and the request."""
    request = Request(name, prompt)
    request.info |= spoil
    parts = []
    while request.num_computed < request.num_tokens:
        left = request.num_tokens - request.num_computed
        parts.append(request.step(talker, min(chunk or left, left)))
    return torch.cat(parts), request


@pytest.mark.parametrize("seconds", [1.0, 2.02, 3.3, 9.99])
def test_a_zero_shot_prefill_is_the_hosts_by_waveform(talker, ours, seconds):
    voice = Voice(talker, seconds, pitch_hz=300.0)
    prompt = ours(voice, ZERO_SHOT)
    rows, _ = prefill(talker, prompt)
    ids = [*chain(*prompt["additional_information"][prompts.TEXT_IDS])]
    assert torch.equal(rows, hosts_rows(talker, ids, voice.used()["speech_token"]))


@torch.inference_mode()
def hosts_rows(talker, ids, tokens):
    """As the runner asks stock: placeholders first, and where the audio's rows go."""
    num_placeholders = 2 + tokens.shape[1]
    embedded = talker.embed_multimodal(speech_token=tokens.long())
    is_audio = torch.zeros(num_placeholders + len(ids), dtype=torch.bool)
    is_audio[:num_placeholders] = True
    return talker.embed_input_ids(
        torch.tensor([1] * num_placeholders + list(ids)),
        multimodal_embeddings=list(embedded),
        is_multimodal=is_audio,
    )


@MODES
def test_each_mode_is_the_official_codes(talker, voice, ours, mode):
    rows, _ = prefill(talker, ours(voice, mode))
    said = "The keeper counts the ships, and then counts them again."
    spoken = "What is said in the reference. 你好"
    manner = "Please speak as softly as you can."
    texts = {
        ZERO_SHOT: (said, f"You are a helpful assistant.<|endofprompt|>{spoken}"),
        CROSS_LINGUAL: (f"You are a helpful assistant.<|endofprompt|>{said}", ""),
        INSTRUCT: (said, f"You are a helpful assistant. {manner}<|endofprompt|>"),
    }
    text, prompt_text = texts[mode]
    tokens, _ = official.used(voice.tokens, voice.mel)
    told = official.model_input(
        ours.tokenizer, mode.name, text, prompt_text, [int(t) for t in tokens]
    )
    with torch.inference_mode():
        expected = official.talker_input(talker.talker, *told)
    assert torch.equal(rows, expected)


def test_as_many_tokens_and_frames_are_used_as_officially():
    for num_tokens, num_frames in product(range(9), range(20)):
        tokens, frames = official.used(range(num_tokens), range(num_frames))
        num_used = used_tokens(num_tokens, num_frames)
        assert (len(tokens), len(frames)) == (num_used, 2 * num_used)


@MODES
@pytest.mark.parametrize("chunk", CHUNKS)
def test_so_it_is_in_chunks(talker, voice, ours, mode, chunk):
    """Stock puts a chunk's rows where the whole prompt's would be."""
    whole, _ = prefill(talker, ours(voice, mode), name="whole")
    rows, request = prefill(talker, ours(voice, mode), chunk=chunk)
    assert torch.equal(rows, whole)
    assert not talker._failed_requests._ids
    for name, tensor in voice.used().items():
        assert torch.equal(request.info["embed"][name], tensor)


@torch.inference_mode()
def test_requests_that_decode_side_by_side_are_asked_for_at_once(talker, voice, ours):
    """A failed one among them: what it computes is thrown away."""
    requests = [
        prefill(
            talker, ours(voice, ZERO_SHOT), name=f"{n}", **(UNKNOWN if n == 1 else {})
        )
        for n in range(3)
    ]
    ids = torch.tensor([17, FAMILY.failure_id, 6_560], dtype=torch.int32)
    found, rows, updates = talker.preprocess_decode_batch(
        input_ids=ids, req_infos=[request.info for _, request in requests]
    )
    assert torch.equal(found, ids) and updates == [{}, {}, {}]
    assert torch.equal(rows, talker.embed_input_ids(ids.long()))


def test_a_preempted_request_goes_on_though_its_voice_was_deleted(talker, ours):
    voice = Voice(talker, pitch_hz=555.0)
    rows, request = prefill(talker, ours(voice, ZERO_SHOT))
    voice.speakers.delete([voice.ref.audio_sha256])
    request.info[FIELD] = [ABSENT, "registered"]
    request.num_computed = 0
    assert torch.equal(request.step(talker), rows)


def dtype_of(talker):
    return talker.talker.llm_decoder.weight.dtype


FORCED = FAMILY.failure_id, ["neighbour", "request", "other"]
SPOILED = {
    **UNNAMED,
    "no-mode": {prompts.MODE: None},
    "other-mode": {prompts.MODE: "x_vector"},
    "the-mode-of-another-length": {prompts.MODE: CROSS_LINGUAL.name},
    "no-text": {prompts.TEXT_IDS: None},
    "empty-texts": {prompts.TEXT_IDS: [[], []]},
    "other-texts": {prompts.TEXT_IDS: [[200, 201], [202]]},
    "no-ids": {prompts.TEXT_IDS: [["a", {}], []]},
    "ids-of-another-model": {prompts.TEXT_IDS: [[], [151_646] * 30]},
    "negative-ids": {prompts.TEXT_IDS: [[-1] * 15, [-1] * 15]},
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_request_without_a_prefill_fails_alone(talker, voice, ours, spoil, chunk):
    before = num_failed(talker)
    prompt = ours(voice, ZERO_SHOT)
    expected, _ = prefill(talker, prompt, name="alone")
    rows, request = prefill(talker, prompt, chunk=chunk, **spoil)
    assert not rows.any() and "embed" not in request.info
    neighbours, _ = prefill(talker, prompt, chunk=chunk, name="neighbour")
    assert torch.equal(neighbours, expected)
    assert num_failed(talker) == before + 1
    assert forced_ids(talker, *FORCED) == ["request"]


MISFITS = {
    "fewer-tokens": lambda v: {"speech_tokens": v.tokens[:-9]},
    "no-codes": lambda v: {"speech_tokens": np.full_like(v.tokens, 6_561)},
    "negative-codes": lambda v: {"speech_tokens": np.full_like(v.tokens, -1)},
    "fewer-frames": lambda v: {"mel": v.mel[:20]},
    "narrower-frames": lambda v: {"mel": v.mel[:, :79]},
    "a-shorter-vector": lambda v: {"speaker": v.vector[:191]},
    "a-row-of-vectors": lambda v: {"speaker": v.vector[None]},
}


@pytest.mark.parametrize("arrays", MISFITS.values(), ids=MISFITS)
def test_encodings_that_do_not_fit_fail_their_request(talker, ours, arrays):
    voice = Voice(talker, pitch_hz=777.0)
    voice.remember(**arrays(voice))
    prefill(talker, ours(voice, ZERO_SHOT))
    voice.remember()  # of the same clip the next case makes its voice
    assert forced_ids(talker, *FORCED) == ["request"]


def test_a_failed_request_is_computed_on_and_nothing_is_made_of_it(talker, voice, ours):
    """Also in the step that asynchronous scheduling has planned already."""
    _, request = prefill(talker, ours(voice, ZERO_SHOT), chunk=32, **UNKNOWN)
    last = torch.tensor([FAMILY.failure_id], dtype=torch.int32)
    assert not request.step(talker, ids=last).any()
    output = talker.make_omni_output(
        torch.zeros(1, 128), model_intermediate_buffer=[request.info]
    )
    assert output.multimodal_outputs == {}


STOPS = [*range(6_561, 6_761)]  # of vLLM-Omni 0.32
VLLM_CONFIG: Any = None  # is not read
ADDED = SamplingParams(min_tokens=9, stop_token_ids=STOPS), [], []


@pytest.mark.parametrize("is_greedy", [False, True])
@torch.inference_mode()
def test_the_hosts_own_sampler_samples_the_failure_id(talker, voice, ours, is_greedy):
    """It is not vLLM's, and raises where no id is left: there are to be more codes."""
    prefill(talker, ours(voice, ZERO_SHOT), **UNKNOWN)
    talker.set_batch_req_ids(["neighbour", "request"])
    logits = talker.compute_logits(torch.randn(2, 128).to(dtype_of(talker)))
    sampling = greedy(2) if is_greedy else drawing(2, {})
    longer = MinTokensLogitsProcessor(VLLM_CONFIG, torch.device("cpu"), False)
    longer.update_state(BatchUpdate(2, [], [(0, *ADDED), (1, *ADDED)], []))
    sampling = replace(sampling, logitsprocs=LogitsProcessors([longer]))
    output = talker.sample(logits, sampling)
    neighbours, failed = output.sampled_token_ids.flatten().tolist()
    assert failed == FAMILY.failure_id and 0 <= neighbours < 6_561


@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_request_is_drawn_alone_as_beside_others(talker, is_greedy):
    """What no request of a step sets the host's sampler took from elsewhere."""
    logits, ones = torch.zeros(1, 6_761), torch.ones(1)
    logits[0, 5], logits[0, 6] = 2.0, 1.5
    penalties = {"repetition_penalties": 2 * ones, "no_penalties": False}
    penalties |= dict.fromkeys(("frequency_penalties", "presence_penalties"), ones)
    penalties |= {"prompt_token_ids": torch.tensor([[3]]), "output_token_ids": [[5]]}

    def drawn(**beside):
        batch = greedy(1) if is_greedy else drawing(1, {0: torch.manual_seed(7)})
        output = talker.sample(logits.clone(), replace(batch, **penalties, **beside))
        return int(output.sampled_token_ids)

    temperature = {"temperature": 0 * ones, "all_greedy": False} if is_greedy else {}
    assert drawn() == drawn(top_p=ones, top_k=6_761 * ones.int(), **temperature)
    assert (drawn() == 5) is is_greedy


@torch.inference_mode()
def test_nothing_samples_the_failure_id_by_chance(talker, monkeypatch):
    logits = talker.compute_logits(torch.randn(64, 128).to(dtype_of(talker)))
    finite = set(logits.isfinite().any(dim=0).nonzero().flatten().tolist())
    assert finite == {*range(6_561), 6_562}
    mode = "cosyvoice3_sampling_mode"  # since 0.32
    monkeypatch.setattr(talker.config, mode, "standard", raising=False)
    logits = talker.compute_logits(torch.randn(64, 128).to(dtype_of(talker)))
    assert FAMILY.failure_id is not None
    assert logits[:, FAMILY.failure_id].isneginf().all()
    # It has a row, should it be looked up in a step that was planned before.
    assert FAMILY.failure_id < len(talker.talker.speech_embedding.weight)
