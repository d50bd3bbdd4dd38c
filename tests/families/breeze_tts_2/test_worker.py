"""The host's own `preprocess_batch`, with codes where it would encode.

Its talker runs on no CPU, so what it loads is stood in for: tables of random numbers
for its text encoder and its codebooks. The codec is the host's, with its weights.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm_omni.model_executor.models.breeze_tts_2 import modeling_breeze as host
from vllm_omni.model_executor.models.breeze_tts_2.first_code_sampler import (
    BreezeFirstCodeSampler,
)
from vllm_omni.model_executor.models.breeze_tts_2.prompt import (
    CFG_UNCOND_SUFFIX,
    build_breeze_prompt,
)

from benchmarks.gpu_check.other_device import another_device, move
from tests.families.breeze_tts_2.case import Tokenizer, host_encoder
from tests.families.runner import UNKNOWN, StoredVoice, clip_of, remember
from tests.in_process_workers import worker_speakers
from vllm_tts_cache.families.breeze_tts_2.encoders import load_reference_encoders
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY, IN_CONTEXT
from vllm_tts_cache.families.breeze_tts_2.prompt import PromptBuilder
from vllm_tts_cache.families.breeze_tts_2.worker import (
    CachedBreezeTalker,
    passing_on_known_codes,
)
from vllm_tts_cache.model_executor.failed_requests import (
    FailedRequests,
    SuspectPrefixes,
)
from vllm_tts_cache.speaker.reference import FIELD

CPU = torch.device("cpu")
HIDDEN, VOCAB, NUM_CODEBOOKS = 8, 2051, 16
TEXT, SPOKEN = "Hello.", "What is said."


class Texts:
    """In the place of a captured text encoder."""

    def __init__(self, table):
        self.table = table

    def run_batch(self, prompts):
        return [self.table(ids.to(self.table.weight.device)) for ids in prompts]


@pytest.fixture
def codec(own_checkpoint):
    return host_encoder(own_checkpoint)


@pytest.fixture
def talker(own_checkpoint, codec, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path))
    talker: Any = CachedBreezeTalker.__new__(CachedBreezeTalker)
    nn.Module.__init__(talker)
    generator = torch.Generator().manual_seed(0)
    table = nn.Embedding(256, HIDDEN)
    frames = nn.Embedding(NUM_CODEBOOKS * VOCAB, HIDDEN)
    for each in (table, frames):
        nn.init.normal_(each.weight, generator=generator)
    texts = Texts(table)
    talker._text_graphs = {
        (number, size): texts for number in range(1, 9) for size in (32, 64, 128)
    }
    talker.config = SimpleNamespace(codebook_eos_token_id=0, vocab_size=VOCAB + 1)
    talker.num_codebooks, talker.codebook_size = NUM_CODEBOOKS, 2048
    talker.depth_decoder = SimpleNamespace(embed_tokens=frames)
    talker.offsets = torch.arange(NUM_CODEBOOKS) * VOCAB
    talker.reference_encoder = codec
    talker._failed_requests = FailedRequests(FAMILY.failure_id or 0)
    talker._suspect_prefixes = SuspectPrefixes()
    encoders = load_reference_encoders(own_checkpoint, CPU)
    speakers = worker_speakers(tmp_path, encoders.values())
    talker.tts_cache_speakers = speakers
    codec.encode_batch = passing_on_known_codes(codec.encode_batch)
    yield talker
    codec.__dict__.pop("encode_batch", None)
    speakers.close()


@pytest.fixture
def clips(talker):
    """Registered and encoded, of different lengths; with what names each."""
    clips = []
    for seed, num_samples in enumerate([24_000, 30_001]):
        noise = 0.1 * np.random.default_rng(seed).standard_normal(num_samples)
        speakers = talker.tts_cache_speakers
        voice = StoredVoice(speakers, noise, 24_000, FAMILY.encoders)
        clips.append((voice.audio, voice.ref))
    return clips


def hosts_info(request_id, audio):
    tokenizer: Any = Tokenizer()
    clip = audio.samples.copy(), 24_000
    made: Any = build_breeze_prompt(tokenizer, TEXT, ref_audio=clip, ref_text=SPOKEN)
    return {**made["additional_information"], "global_request_id": [request_id]}


def our_info(request_id, audio, ref, **changed):
    builder = PromptBuilder(Tokenizer())
    made = builder.clone(TEXT, SPOKEN, mode=IN_CONTEXT, clip=clip_of(audio))
    told = {**made["additional_information"], FIELD: ref.to_wire()}
    return {**told, "global_request_id": [request_id], **changed}


def preprocess(talker, infos, *, by: Any = CachedBreezeTalker, device=CPU):
    by.preprocess_batch(
        talker, req_ids=list(infos), model_intermediate_buffer=infos, device=device
    )


def prepared(talker, infos, **by):
    preprocess(talker, infos, **by)
    return [info["breeze_prepared"]["embeds"] for info in infos.values()]


def as_the_host(talker, audio):
    """Alone: the host encodes clips of one step together, padded to one length."""
    infos = {"r": hosts_info("r", audio)}
    (rows,) = prepared(talker, infos, by=host.BreezeForConditionalGeneration)
    return rows


def test_what_requests_begin_with_is_the_hosts(talker, clips):
    ours = {f"r{n}": our_info(f"r{n}", *c) for n, c in enumerate(clips)}
    made = prepared(talker, ours)
    for rows, (audio, _), info in zip(made, clips, ours.values(), strict=True):
        assert torch.equal(rows, as_the_host(talker, audio))
        assert "reference_waveform" not in info


def test_on_another_device_they_are_the_same(talker, clips):
    (expected,) = prepared(talker, {"r": our_info("r", *clips[0])})
    with another_device() as device:
        words = talker._text_graphs[1, 32].table
        for part in (talker, talker.depth_decoder.embed_tokens, words):
            move(part)
        (made,) = prepared(talker, {"r": our_info("r", *clips[0])}, device=device)
        assert "r" not in talker._failed_requests
        assert made.device == device
        assert torch.equal(made.cpu(), expected)


def test_a_clip_of_ours_never_comes_to_the_hosts_encoder(talker, clips, monkeypatch):
    def refuse(*_):
        raise AssertionError("the host encodes")

    monkeypatch.setattr(talker.reference_encoder, "_compiled_encode", refuse)
    prepared(talker, {"r": our_info("r", *clips[0])})
    assert "r" not in talker._failed_requests
    infos = {
        "hosts": hosts_info("hosts", clips[0][0]),
        "ours": our_info("ours", *clips[0]),
    }
    preprocess(talker, infos)
    assert "hosts" in talker._failed_requests, "what the host raises fails it alone"
    assert "ours" not in talker._failed_requests
    assert "embeds" in infos["ours"]["breeze_prepared"]


def test_a_request_that_no_adapter_built_fails_alone(talker, clips):
    """As the host's own routes bring one: ids, and nothing to speak."""
    named = {FIELD: clips[0][1].to_wire()}
    infos = {"bare": {}, "named": named}
    infos["ours"] = our_info("ours", *clips[0])
    preprocess(talker, infos)
    talker.hidden_size = HIDDEN
    talker.lm_head = SimpleNamespace(weight=torch.zeros(1, HIDDEN))
    talker.model = SimpleNamespace(norm=talker.lm_head)
    ids = torch.ones(60, dtype=torch.long)
    bare = {**infos["bare"], "request_id": "bare", "_omni_is_prefill": True}
    _, rows, update = talker.preprocess(ids, None, **bare)
    assert rows.shape == (60, HIDDEN) and "breeze_state" in update
    assert all(name in talker._failed_requests for name in ("bare", "named"))
    assert "ours" not in talker._failed_requests


def test_a_waveform_is_still_the_hosts_to_encode(talker, clips):
    (first, ref), (second, _) = clips
    tokenizer: Any = Tokenizer()
    plain: Any = build_breeze_prompt(tokenizer, TEXT)
    mixed = {
        "r0": hosts_info("r0", second),
        "r1": our_info("r1", first, ref),
        "r2": {**plain["additional_information"], "global_request_id": ["r2"]},
    }
    alone = [as_the_host(talker, audio) for audio in (second, first)]
    made = prepared(talker, mixed)
    assert torch.equal(made[0], alone[0])
    assert torch.equal(made[1], alone[1])
    assert len(made[2]) == len(mixed["r2"]["breeze_prompt"]["target_ids"])


def test_both_branches_of_a_guided_request_have_the_voice(talker, clips):
    (audio, ref), _ = clips
    branch = "r" + CFG_UNCOND_SUFFIX
    both = {"r": our_info("r", audio, ref), branch: our_info(branch, audio, ref)}
    both[branch]["breeze_prompt"]["role"] = "uncond"
    one, other = prepared(talker, both)
    assert torch.equal(one, other)
    assert torch.equal(one, as_the_host(talker, audio))


@pytest.mark.parametrize("lost", ["r", "r" + CFG_UNCOND_SUFFIX])
def test_a_branch_fails_with_the_other_and_with_no_other(talker, clips, lost):
    (audio, ref), (other, other_ref) = clips
    branch = "r" + CFG_UNCOND_SUFFIX
    # What the worker calls them is not what the client does.
    infos = {
        "1": our_info("r", audio, ref),
        "2": our_info(branch, audio, ref),
        "3": our_info("neighbour", other, other_ref),
    }
    infos["2"]["breeze_prompt"]["role"] = "uncond"
    infos["1" if lost == "r" else "2"][FIELD] = UNKNOWN[FIELD]
    prepared(talker, infos)
    assert [each in talker._failed_requests for each in infos] == [True, True, False]


def test_a_request_that_goes_on_is_left_alone(talker, clips):
    (audio, ref), _ = clips
    info = our_info("r", audio, ref, breeze_state={})
    preprocess(talker, {"r": info})
    assert "breeze_prepared" not in info


def test_nothing_is_heard_of_a_request_that_fails(talker, clips):
    """Its first frame went on before the id that is forced ended it."""
    (audio, ref), _ = clips
    infos = {"1": our_info("one", audio, ref), "2": our_info("two", audio, ref)}
    infos["1"][FIELD] = UNKNOWN[FIELD]
    prepared(talker, infos)
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    for name, info in infos.items():
        info |= {"request_id": name, "breeze_sampling": greedy}
        info["breeze_state"] = {
            "generator": torch.Generator(),
            "history": torch.empty((1, 0), dtype=torch.long),
        }
    talker.hidden_size, talker.config.eos_token_id = HIDDEN, VOCAB
    talker.lm_head = SimpleNamespace(weight=torch.randn(VOCAB + 1, HIDDEN))
    talker._first_code_sampler = BreezeFirstCodeSampler()
    frame = torch.arange(NUM_CODEBOOKS)
    talker.depth_decoder.generate_frames = lambda _, first, **__: frame.expand(
        len(first), -1
    )
    output = talker.make_omni_output(
        10.0 * talker.lm_head.weight[[5, 6]],
        model_intermediate_buffer=list(infos.values()),
        request_token_spans=[(0, 1), (1, 2)],
    )
    failed, well = output.multimodal_outputs["codes"]["audio"]
    assert failed.shape == (0, NUM_CODEBOOKS)
    assert torch.equal(well, frame[None])
    profiled = talker.make_omni_output(torch.zeros(2, HIDDEN))
    assert profiled.multimodal_outputs == {}


@pytest.mark.parametrize("wrong", ["unknown", "of another length", "out of range"])
def test_one_request_fails_alone(talker, clips, wrong):
    (audio, ref), (other, other_ref) = clips
    infos = {
        "r": our_info("r", audio, ref),
        "neighbour": our_info("neighbour", other, other_ref),
    }
    speakers = talker.tts_cache_speakers
    if wrong == "unknown":
        infos["r"] |= UNKNOWN
    elif wrong == "of another length":
        infos["r"][FIELD] = other_ref.to_wire()
    else:
        codes = speakers.prompt(ref, FAMILY.encoders)["codec"]["codes"].copy()
        codes[3, 5] = 2048
        remember(speakers, ref, codec={"codes": codes})
    made = prepared(talker, infos)
    assert list(map(len, made)) == [
        len(i["breeze_prompt"]["reference_ids"])
        + len(i["breeze_prompt"]["target_ids"])
        + i["breeze_prompt"]["reference_frames"]
        + 1
        for i in infos.values()
    ]
    assert torch.equal(made[1], as_the_host(talker, other))
    assert "r" in talker._failed_requests
    assert "neighbour" not in talker._failed_requests
    logits = torch.zeros(2, VOCAB + 1)
    talker._failed_requests.end(logits, ["r", "neighbour"])
    assert int(logits[0].argmax()) == FAMILY.failure_id
    assert torch.equal(logits[1], torch.zeros(VOCAB + 1))
