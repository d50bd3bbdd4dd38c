"""A reference by content address gives the host's own rows, and more than the host.

Both sides run on the real talker of a tiny checkpoint. The host's side is what its own
adapter sends, in the one case that the host serves: a prefill as a whole.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.higgs_audio_v2 import (
    higgs_audio_v2_talker as host,
)
from vllm_omni.model_executor.models.higgs_audio_v2.higgs_audio_v2_tokenizer import (
    _build_delay_pattern,
)

from tests.audio_clips import voiced
from tests.families.higgs_audio_v2.steps import rows_of
from tests.in_process_workers import prepare, ref_of, store_clip
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.families.higgs_audio_v2.family import CODEC, FAMILY
from vllm_tts_cache.families.higgs_audio_v2.prompt import (
    PromptBuilder,
    num_reference_rows,
)
from vllm_tts_cache.families.higgs_audio_v2.worker import CachedHiggsAudioV2Talker
from vllm_tts_cache.families.networks import rows as reference_rows
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.opening import open_store

RATE_HZ = 24_000
TEXT, SPOKEN = "The keeper counts the ships.", "What is said in the reference."
ABSENT = "0" * 64
CHUNKS = (1, 7, 16, 64)


@pytest.fixture(autouse=True)
def nothing_failed_before(talker):
    talker._failed_requests._ids.clear()


@pytest.fixture(autouse=True)
def every_step_is_over(talker):
    yield
    talker._suspect_prefixes.end_step()


@pytest.fixture
def voice(talker, higgs_audio_v2_checkpoint):
    return Voice(talker, higgs_audio_v2_checkpoint)


class Voice:
    """A clip whose encoding is in the worker's memory, and its prompt."""

    def __init__(self, talker, checkpoint, pitch_hz=220.0):
        from transformers import AutoTokenizer

        samples = np.ascontiguousarray(voiced(RATE_HZ, 3.3, pitch_hz=pitch_hz)[:, 0])
        audio = ReferenceAudio.of(samples, RATE_HZ)
        ref = ref_of(audio)
        store = open_store(load_settings())
        store_clip(store, audio)
        store.close()
        speakers = talker.tts_cache_speakers
        prepare(speakers, ref, FAMILY.encoders)
        self.codes = speakers.prompt(ref, (CODEC,))[CODEC]["codes"]
        made = PromptBuilder(AutoTokenizer.from_pretrained(checkpoint)).clone(
            TEXT, SPOKEN, ref=ref, num_rows=num_reference_rows(len(samples), RATE_HZ)
        )
        self.ids = torch.tensor(made["prompt_token_ids"])
        self._info = made["additional_information"]

    def info(self, **changed):
        return {**self._info, "generated_len": 0, **changed}


def expected_rows(talker, voice):
    """By the host's own embedding of what its own adapter sends."""
    delayed = _build_delay_pattern(torch.tensor(voice.codes.T).long()).T
    where = ReferenceRows.from_info(voice.info())
    assert len(delayed) == where.num_rows
    with torch.inference_mode():
        rows = talker.embed_tokens(voice.ids).clone()
        offsets = talker.audio_tokens_offsets
        summed = talker.audio_codebook_embeddings(delayed + offsets).sum(dim=-2)
        rows[where.start : where.start + where.num_rows] = summed.to(rows.dtype)
    return rows


def as_the_host(talker, voice, monkeypatch):
    """By the host's substitution, in a step that has all of the placeholders."""
    from vllm import forward_context

    ends = torch.tensor([0, len(voice.ids)], dtype=torch.int32)
    metadata = SimpleNamespace(query_start_loc=ends)
    context = SimpleNamespace(attn_metadata=metadata)
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: context)
    delayed = _build_delay_pattern(torch.tensor(voice.codes.T).long()).T
    sent = {
        "audio_input_ids": delayed,
        "audio_input_ids_mask": torch.ones(len(delayed), dtype=torch.bool),
    }
    put_in = host.HiggsAudioV2TalkerForConditionalGeneration
    with torch.inference_mode():
        rows = talker.embed_tokens(voice.ids)
        return put_in._maybe_apply_ref_audio_substitution(
            talker, rows, voice.ids, [sent]
        )


def num_failed(talker):
    return talker.tts_cache_speakers.stats().failed_prompts


def test_the_registered_model_is_ours(talker):
    assert type(talker) is CachedHiggsAudioV2Talker


def test_a_prefill_is_the_hosts(talker, voice, monkeypatch):
    (ours,) = rows_of(talker, [voice.ids], [0], [voice.info()])
    assert torch.equal(ours, expected_rows(talker, voice))
    assert torch.equal(ours, as_the_host(talker, voice, monkeypatch))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prefill_in_chunks_keeps_the_voice(talker, voice, chunk):
    """The host leaves it out: a chunk has too few placeholders for all codes."""
    info, parts = voice.info(), []
    for begin in range(0, len(voice.ids), chunk):
        span = voice.ids[begin : begin + chunk]
        parts += rows_of(talker, [span], [begin], [info])
    assert torch.equal(torch.cat(parts), expected_rows(talker, voice))


def test_requests_of_one_step_keep_their_voices(
    talker, voice, higgs_audio_v2_checkpoint
):
    other = Voice(talker, higgs_audio_v2_checkpoint, pitch_hz=330.0)
    assert not np.array_equal(voice.codes, other.codes)
    made = rows_of(talker, [voice.ids, other.ids], [0, 0], [voice.info(), other.info()])
    for rows, each in zip(made, (voice, other), strict=True):
        assert torch.equal(rows, expected_rows(talker, each))


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
    before = num_failed(talker)
    infos = [voice.info(**wrong), voice.info()]
    made = rows_of(talker, [voice.ids, voice.ids], [0, 0], infos)
    assert torch.equal(made[1], expected_rows(talker, voice))
    assert num_failed(talker) == before + 1
    assert "one" in talker._failed_requests
    assert "other" not in talker._failed_requests
    sampled = torch.tensor([[128_016], [128_016]])
    talker._failed_requests.force(sampled, ["one", "other"])
    assert sampled.tolist() == [[FAMILY.failure_id], [128_016]]


def test_a_request_without_a_voice_is_left_to_the_host(talker):
    ids = torch.arange(300, 340)
    (rows,) = rows_of(talker, [ids], [0], [{"generated_len": 0}])
    assert torch.equal(rows, talker.embed_tokens(ids))
