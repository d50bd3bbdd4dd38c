"""A reference by content address gives the host's own rows.

Beside the host's embedding of a clone, over tables of random numbers: its layers are
not what is ours.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm_omni.model_executor.models.audio8_tts import audio8_tts_slow_ar as host

from tests.in_process_workers import (
    SpectrumEncoder,
    clip,
    prepare,
    store_clip,
    worker_speakers,
)
from vllm_tts_cache.config import Settings
from vllm_tts_cache.families.audio8_tts.family import FAMILY
from vllm_tts_cache.families.audio8_tts.prompt import PromptBuilder, SemanticCodes
from vllm_tts_cache.families.audio8_tts.worker import CachedAudio8SlowAR
from vllm_tts_cache.families.networks import rows as reference_rows
from vllm_tts_cache.model_executor.failed_requests import (
    FailedRequests,
    SuspectPrefixes,
)
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_store

HIDDEN, NUM_CODEBOOKS, CODEBOOK = 16, 10, 4096
FIRST, LAST, END, PAD = 300, 300 + CODEBOOK - 1, 290, 291
TEXT, SPOKEN = "Hello.", "What is said."
ABSENT = "0" * 64
NUM_FRAMES = 23


class CodesEncoder(SpectrumEncoder):
    """Random codes, others for each clip."""

    def encode(self, audio):
        seed = int(audio.audio_sha256[:8], 16)
        codes = np.random.default_rng(seed).integers(0, 1024, (NUM_FRAMES, 10))
        return Encoding({"codes": codes.astype(np.int16)})


@pytest.fixture
def talker(tokenizer, tmp_path):
    talker: Any = CachedAudio8SlowAR.__new__(CachedAudio8SlowAR)
    nn.Module.__init__(talker)
    generator = torch.Generator().manual_seed(0)
    words = nn.Embedding(LAST + 1, HIDDEN)
    codes = nn.Embedding(NUM_CODEBOOKS * CODEBOOK, HIDDEN)
    for table in (words, codes):
        nn.init.normal_(table.weight, generator=generator)
        table.weight.requires_grad_(False)
    talker.model = SimpleNamespace(embed_input_ids=words)
    talker.codebook_embeddings = codes
    talker._num_codebooks, talker._codebook_size = NUM_CODEBOOKS, CODEBOOK
    talker._semantic_begin_id, talker._semantic_end_id = FIRST, LAST
    talker._num_semantic_ids = CODEBOOK
    talker._eos_token_id, talker._pad_token_id = END, PAD
    talker._ras_window_size = 0
    talker._tokenizer = tokenizer
    talker._failed_requests = FailedRequests(FAMILY.failure_id or 0)
    talker._suspect_prefixes = SuspectPrefixes()
    talker._requests_of_rows = []
    speakers = worker_speakers(tmp_path, [CodesEncoder("codec")])
    talker.tts_cache_speakers = speakers
    yield talker
    speakers.close()


class Voice:
    """A clip whose encoding is in the worker's memory, and its prompt."""

    def __init__(self, talker, tokenizer, directory, seed=0):
        audio = clip(seed=seed)
        store = open_store(Settings(samples_dir=directory))
        ref = store_clip(store, audio)
        store.close()
        prepare(talker.tts_cache_speakers, ref, FAMILY.encoders)
        found = talker.tts_cache_speakers.prompt(ref, FAMILY.encoders)
        self.codes = found["codec"]["codes"]
        key = EncodingKey(audio_sha256=ref.audio_sha256, encoder_fingerprint="f" * 64)
        builder = PromptBuilder(tokenizer=tokenizer, first_semantic_id=FIRST)
        semantic = SemanticCodes.of(key, self.codes)
        made = builder.clone(TEXT, SPOKEN, ref=ref, semantic=semantic)
        self.ids = torch.tensor(made["prompt_token_ids"])
        self._info = made["additional_information"]

    def rows(self, talker, begin=0, end=None, request_id="r", **changed):
        info = {
            **self._info,
            "request_id": request_id,
            "_omni_is_prefill": True,
            "_omni_num_computed_tokens": begin,
            "_omni_prompt_len": len(self.ids),
            **changed,
        }
        ids, made, update = talker.preprocess(self.ids[begin:end], None, **info)
        assert torch.equal(ids, torch.full_like(ids, PAD))
        assert not update["codes"]["audio"].any()
        assert update["codes"]["audio"].shape == (len(made), NUM_CODEBOOKS)
        return made


@pytest.fixture
def voice(talker, tokenizer, tmp_path):
    return Voice(talker, tokenizer, tmp_path)


def hosts_rows(talker, voice):
    codes = torch.tensor(voice.codes, dtype=torch.long)
    return talker._embed_voice_clone_prompt(TEXT, SPOKEN, codes)


def test_a_prefill_is_the_hosts(talker, voice):
    assert torch.equal(voice.rows(talker), hosts_rows(talker, voice))


def test_a_clip_of_ours_never_comes_to_the_hosts_encoder(talker, voice, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the host encodes")

    monkeypatch.setattr(host, "encode_reference_audio_codes", refuse)
    talker.model_path = "nowhere"
    talker.config = SimpleNamespace(
        codec_post_n_layer=1,
        codec_post_n_head=1,
        codec_post_n_local_heads=1,
        codec_post_intermediate_size=1,
    )
    clip = {"ref_audio_wav": torch.zeros(9), "ref_audio_sr": 24_000}
    with pytest.raises(AssertionError, match="the host encodes"):
        talker._build_voice_clone_prefill_embeds(
            {"text": TEXT, "ref_text": SPOKEN, **clip}
        )
    voice.rows(talker)


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_so_is_one_in_chunks(talker, voice, size):
    begins = range(0, len(voice.ids), size)
    made = [voice.rows(talker, begin, begin + size) for begin in begins]
    assert torch.equal(torch.cat(made), hosts_rows(talker, voice))
    assert talker.tts_cache_speakers.stats().prompts == 1


def test_text_without_a_voice_is_prefilled_without_pinned_memory(talker):
    ids = torch.arange(40)
    _, made, _ = talker.preprocess(ids, None, request_id="r", _omni_is_prefill=True)
    assert torch.equal(made, talker.embed_input_ids(ids).to(torch.bfloat16))


@pytest.mark.parametrize(
    "wrong",
    [
        {FIELD: [ABSENT, "registered"]},
        {reference_rows.FIELD: None},
        {reference_rows.FIELD: [1, 20, 0]},
    ],
    ids=["unknown", "nowhere", "of another length"],
)
def test_one_request_fails_alone(talker, voice, wrong):
    voice.rows(talker, request_id="failing", **wrong)
    assert torch.equal(voice.rows(talker), hosts_rows(talker, voice))
    assert "failing" in talker._failed_requests
    assert "r" not in talker._failed_requests


def test_what_fails_behind_its_codes_leaves_its_prefix_suspect(
    talker, voice, monkeypatch
):
    def full(_rows):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(talker.codebook_embeddings, "forward", full)
        voice.rows(talker, request_id="failing")
    voice.rows(talker, begin=len(voice.ids) - 1, request_id="late")
    assert "failing" in talker._failed_requests
    assert "late" in talker._failed_requests


def metadata(**changed):
    nothing = SimpleNamespace(non_argmax_invariant=())
    return SimpleNamespace(
        **{
            "max_num_logprobs": None,
            "no_penalties": True,
            "bad_words_token_ids": {},
            "allowed_token_ids_mask": None,
            "logitsprocs": nothing,
            "temperature": None,
            "all_greedy": True,
            **changed,
        }
    )


@pytest.fixture
def one_failed(talker, voice):
    voice.rows(talker, request_id="failing", **{FIELD: [ABSENT, "registered"]})
    talker.set_batch_req_ids(["failing", "r"])
    logits = torch.full((2, LAST + 1), float("-inf"))
    logits[:, FIRST + 5] = 0.0
    return logits


def test_the_hosts_sampler_is_followed_by_the_id_that_ends_it(talker, one_failed):
    sampled = talker.sample(one_failed, metadata()).sampled_token_ids
    assert sampled.tolist() == [[FAMILY.failure_id], [FIRST + 5]]


def test_vllms_own_sampler_is_left_that_id(talker, one_failed):
    assert talker.sample(one_failed, metadata(no_penalties=False)) is None
    assert one_failed.argmax(dim=-1).tolist() == [FAMILY.failure_id, FIRST + 5]
