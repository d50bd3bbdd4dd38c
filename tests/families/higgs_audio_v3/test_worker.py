"""A reference by content address gives the host's own rows, bit for bit.

Both sides run on the real talker of a tiny checkpoint. The host's side is what its own
adapter sends: the delayed codes, and where they stand.
"""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.higgs_audio_v3 import (
    higgs_audio_v3_talker as host,
)
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    apply_delay_pattern,
)
from vllm_omni.worker import gpu_model_runner

from tests.audio_clips import voiced
from tests.families.higgs_audio_v3.case import CASE
from tests.in_process_workers import prepare, ref_of, store_clip
from tests.real_talker import loaded_talker
from tests.sampling import drawing, greedy
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.families.higgs_audio_v3 import worker
from vllm_tts_cache.families.higgs_audio_v3.family import CODEC, FAMILY
from vllm_tts_cache.families.higgs_audio_v3.prompt import (
    PromptBuilder,
    num_reference_rows,
)
from vllm_tts_cache.families.higgs_audio_v3.worker import CachedHiggsAudioV3Talker
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.opening import open_store

RATE_HZ = 24_000
TEXT = "The keeper counts the ships, and then counts them again."
SPOKEN = "What is said in the reference."
ABSENT = "0" * 64
CHUNKS = (1, 7, 16, 64)
EOS, AUDIO = 151_643, 151_670
BOC = 1024  # of a codebook that has not begun


@pytest.fixture(scope="module")
def talker(higgs_audio_v3_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("talker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(directory / "samples"))
        with loaded_talker(CASE, higgs_audio_v3_checkpoint, directory) as model:
            yield model


@pytest.fixture(autouse=True)
def nothing_failed_before(talker):
    talker._failed_requests._ids.clear()
    talker._suspect_prefixes._prefixes.clear()
    talker._suspect_prefixes._relied_on.clear()


@pytest.fixture(scope="module")
def builder(higgs_audio_v3_checkpoint):
    from transformers import AutoTokenizer

    return PromptBuilder(AutoTokenizer.from_pretrained(higgs_audio_v3_checkpoint))


class Voice:
    """A clip whose encoding is in the worker's memory, and its prompts."""

    def __init__(self, talker, builder, pitch_hz=220.0):
        samples = np.ascontiguousarray(voiced(RATE_HZ, 3.3, pitch_hz=pitch_hz)[:, 0])
        self.audio = ReferenceAudio.of(samples, RATE_HZ)
        self.ref = ref_of(self.audio)
        self._builder = builder
        self._speakers = talker.tts_cache_speakers
        store = open_store(load_settings())
        store_clip(store, self.audio)
        store.close()
        prepare(self._speakers, self.ref, FAMILY.encoders)

    def prompt(self, text=TEXT, spoken=SPOKEN, **changed):
        num_rows = num_reference_rows(self.audio.num_samples, RATE_HZ)
        made = self._builder.clone(text, spoken, ref=self.ref, num_rows=num_rows)
        info = {**made["additional_information"], "generated_len": 0, **changed}
        return torch.tensor(made["prompt_token_ids"]), info

    @property
    def codes(self):
        return self._speakers.prompt(self.ref, (CODEC,))[CODEC]["codes"]


@pytest.fixture
def voice(talker, builder):
    return Voice(talker, builder)


def begin_step(talker, spans, request_ids):
    """What the runner says of a step before it is computed."""
    ends = np.cumsum([0, *(len(ids) for ids in spans)])
    talker.update_decode_step_metadata(
        input_ids=torch.cat(list(spans)),
        omni_query_start_loc=torch.tensor(ends, dtype=torch.int32),
        req_ids=list(request_ids),
    )


def rows_of(talker, spans, begins, infos, request_ids=("one", "other", "third")):
    """The rows that the layers would be given in a step; the step is ours."""
    ids = torch.cat(list(spans))
    positions = torch.cat(
        [torch.arange(b, b + len(s)) for b, s in zip(begins, spans, strict=True)]
    )
    begin_step(talker, spans, request_ids[: len(spans)])
    computed = []
    run = talker._run_qwen3_layers_mlp_graph
    talker._run_qwen3_layers_mlp_graph = lambda _positions, rows: (
        computed.append(rows.clone()) or rows
    )
    try:
        with torch.inference_mode():
            talker.forward(ids, positions, model_intermediate_buffer=infos)
    finally:
        talker._run_qwen3_layers_mlp_graph = run
    talker._suspect_prefixes.end_step()
    (rows,) = computed
    return rows.split([len(span) for span in spans])


def prefill(talker, ids, info, *, chunk=None, start=0):
    parts = []
    while start < len(ids):
        span = ids[start : start + (chunk or len(ids))]
        parts += rows_of(talker, [span], [start], [info])
        start += len(span)
    return torch.cat(parts)


def as_the_host(talker, voice, ids, info):
    """The same rows of what the host's own adapter sends, by nothing but its code."""
    where = ReferenceRows.from_info(info)
    delayed = apply_delay_pattern(torch.tensor(voice.codes).long())
    sent = {
        "audio_input_ids": delayed,
        "audio_input_ids_mask": torch.ones(len(delayed), dtype=torch.bool),
        "audio_placeholder_positions": where.start + torch.arange(len(delayed)),
    }
    positions = torch.arange(len(ids))
    begin_step(talker, [ids], ["host"])
    with torch.inference_mode():
        rows = talker.model.embed_tokens(ids)
        stock: Any = host.HiggsAudioV3TalkerForConditionalGeneration
        put_in = stock._apply_ref_audio_substitution
        return put_in(talker, rows, ids, positions, [sent])


def num_failed(talker):
    return talker.tts_cache_speakers.stats().failed_prompts


def test_the_registered_model_is_ours(talker):
    assert type(talker) is CachedHiggsAudioV3Talker
    assert talker.tts_cache_speakers is not None


def test_a_prefill_is_the_hosts(talker, voice):
    ids, info = voice.prompt()
    ours = prefill(talker, ids, dict(info))
    assert torch.equal(ours, as_the_host(talker, voice, ids, info))
    where = ReferenceRows.from_info(info)
    plain = talker.model.embed_tokens(ids)
    differs = (ours != plain).any(dim=1).nonzero().flatten().tolist()
    assert differs == list(range(where.start, where.start + where.num_rows))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prefill_in_chunks_is_the_hosts(talker, voice, chunk):
    """The host passes over a chunk of one token, where no other span is longer."""
    ids, info = voice.prompt()
    ours = prefill(talker, ids, dict(info), chunk=chunk)
    assert torch.equal(ours, as_the_host(talker, voice, ids, info))


@pytest.mark.parametrize("start", [1, 32, 64])
def test_after_a_hit_only_the_rest_is_given(talker, voice, start):
    ids, info = voice.prompt()
    ours = prefill(talker, ids, dict(info), start=start)
    assert torch.equal(ours, as_the_host(talker, voice, ids, info)[start:])


def test_requests_of_one_step_keep_their_voices(talker, builder, voice):
    other = Voice(talker, builder, pitch_hz=330.0)
    assert not np.array_equal(voice.codes, other.codes)
    wanted = []
    for each in (voice, other):
        ids, info = each.prompt()
        wanted.append((ids, info, as_the_host(talker, each, ids, info)))
    spans, infos = [ids for ids, _, _ in wanted], [dict(info) for _, info, _ in wanted]
    made = rows_of(talker, spans, [0, 0], infos)
    for rows, (_, _, expected) in zip(made, wanted, strict=True):
        assert torch.equal(rows, expected)


def test_a_prompt_is_counted_once(talker, voice):
    before = talker.tts_cache_speakers.stats().prompts
    ids, info = voice.prompt()
    prefill(talker, ids, info, chunk=16)
    assert talker.tts_cache_speakers.stats().prompts == before + 1


def test_a_request_without_a_voice_is_left_to_the_host(talker):
    ids = torch.arange(300, 340)
    ours = prefill(talker, ids, {"generated_len": 0})
    assert torch.equal(ours, talker.model.embed_tokens(ids))


@pytest.mark.parametrize(
    "wrong",
    [
        {FIELD: [ABSENT, "registered"]},
        {FIELD: ["no address", "registered"]},
        {"tts_cache_reference_rows": None},
        {"tts_cache_reference_rows": [1, 5, 0]},
    ],
    ids=["unknown", "no address", "nowhere", "of another length"],
)
def test_one_request_fails_alone(talker, voice, wrong):
    before = num_failed(talker)
    ids, good = voice.prompt()
    expected = as_the_host(talker, voice, ids, good)
    rows = rows_of(talker, [ids, ids], [0, 0], [{**good, **wrong}, dict(good)])
    assert torch.equal(rows[1], expected)
    assert num_failed(talker) == before + 1
    assert "one" in talker._failed_requests and "other" not in talker._failed_requests
    sampled = torch.tensor([[EOS], [EOS]], dtype=torch.int32)
    talker._failed_requests.force(sampled, ["one", "other"])
    assert sampled.tolist() == [[FAMILY.failure_id], [EOS]]


def test_a_failed_request_is_not_asked_for_again(talker, voice):
    ids, info = voice.prompt(**{FIELD: [ABSENT, "registered"]})
    before = num_failed(talker)
    prefill(talker, ids, info, chunk=16)
    assert num_failed(talker) == before + 1


def test_what_relied_on_a_failing_prefix_in_the_same_step_fails_too(talker, voice):
    ids, info = voice.prompt()
    where = ReferenceRows.from_info(info)
    start = where.start + 32
    wrong = {**info, "tts_cache_reference_rows": [where.start, 5, where.checksum]}
    rows_of(talker, [ids[start:], ids], [start, 0], [dict(info), wrong])
    assert {"one", "other"} <= set(talker._failed_requests._ids)
    rows_of(talker, [ids[start:]], [start], [dict(info)], request_ids=["late"])
    assert "late" in talker._failed_requests, "the blocks may not be dropped yet"
    rows_of(talker, [ids], [0], [dict(info)], request_ids=["fresh"])
    rows_of(talker, [ids[start:]], [start], [dict(info)], request_ids=["later"])
    assert not {"fresh", "later"} & set(talker._failed_requests._ids)


def test_a_clip_with_another_transcript_does_not_clear_a_prefix(talker, voice):
    ids, info = voice.prompt()
    other_ids, other = voice.prompt(spoken="Other words.")
    where = ReferenceRows.from_info(info)
    wrong = {**info, "tts_cache_reference_rows": [where.start, 5, where.checksum]}
    rows_of(talker, [ids], [0], [wrong], request_ids=["failing"])
    rows_of(talker, [other_ids], [0], [other], request_ids=["computes"])
    start = where.start + 32
    rows_of(talker, [ids[start:]], [start], [dict(info)], request_ids=["late"])
    assert set(talker._failed_requests._ids) == {"failing", "late"}


def test_what_fails_behind_its_codes_leaves_its_prefix_suspect(
    talker, voice, monkeypatch
):
    def full(_codes):
        raise torch.OutOfMemoryError("no room")

    ids, info = voice.prompt()
    start = ReferenceRows.from_info(info).start + 32
    with monkeypatch.context() as patch:
        patch.setattr(worker, "apply_delay_pattern", full)
        rows_of(talker, [ids], [0], [dict(info)])
    rows_of(talker, [ids[start:]], [start], [dict(info)], request_ids=["late"])
    assert {"one", "late"} <= set(talker._failed_requests._ids)


def test_a_checkpoint_that_takes_no_transcript_is_told_none(builder, voice):
    mute = PromptBuilder(builder.hosts.tokenizer)
    mute.hosts.ref_text_id = None
    told, plain = (
        mute.clone(TEXT, spoken, ref=voice.ref, num_rows=90)
        for spoken in (SPOKEN, None)
    )
    assert told == plain


def test_a_failed_request_samples_the_id_that_ends_it(talker, voice):
    """The host samples by itself: what its logits say of a text id is masked."""
    talker._failed_requests._ids["one"] = None
    talker.set_batch_req_ids(["one", "other"])
    begin_step(talker, [torch.tensor([151_670])] * 2, ["one", "other"])
    hidden = torch.randn(2, talker.config.hidden_size, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = talker.compute_logits(hidden)
        output = talker.sample(logits, greedy(2))
    ids = output.sampled_token_ids.flatten().tolist()
    assert ids == [FAMILY.failure_id, talker._audio_continuation_id]


def drawn(talker, request_id, seed, *, neighbours=()):
    """The codes of two decode steps that were drawn for a request.

    Args:
        talker: Whose.
        request_id: A new one.
        seed: Its own.
        neighbours: Others that begin with the first step, and leave after it.
    """
    hidden = torch.randn(
        1, talker.config.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    generators, codes = {0: torch.Generator().manual_seed(seed)}, []
    for others in (neighbours, ()):
        ids = [torch.tensor([AUDIO])] + [torch.tensor([300, AUDIO])] * len(others)
        rows = hidden.to(torch.bfloat16).repeat(len(ids), 1)
        with torch.inference_mode():
            talker.set_batch_req_ids([request_id, *others])
            begin_step(talker, ids, [request_id, *others])
            logits = talker.compute_logits(rows)
            talker.sample(logits, drawing(len(ids), generators))
            published, *_ = [talker.postprocess(rows) for _ in ids]
        codes.append(published["codes"]["audio"])
    return torch.cat(codes)


def test_what_is_drawn_for_a_request_depends_on_no_neighbour(talker):
    """The host draws once more in each step in which one of its rows does not speak."""
    alone = drawn(talker, "alone", seed=5)
    assert not torch.equal(drawn(talker, "another", seed=6), alone)
    for name, others in (("again", ()), ("beside", ("newcomer",))):
        assert torch.equal(drawn(talker, name, seed=5, neighbours=others), alone)


def test_what_was_published_stays_as_it_is(talker):
    """The host sends it only when the next step has been sampled."""
    first, second = drawn(talker, "speaks", seed=5)
    assert first[1:].unique().tolist() == [BOC]
    assert second[2:].unique().tolist() == [BOC] and second[1] != BOC


def test_the_runner_hands_out_its_own_infos_and_says_whose_they_are():
    """What is put into them in the first step is there in the later ones."""
    runner = gpu_model_runner.OmniGPUModelRunner
    gather = inspect.getsource(runner._gather_runtime_additional_information)
    assert "per_req_runtime_info.append(info)" in gather
    assert 'info["generated_len"]' in gather
    forward = inspect.getsource(runner._model_forward)
    assert forward.index("update_decode_metadata(") < forward.index(
        "super()._model_forward("
    )
    assert "req_ids=self.input_batch.req_ids" in forward
