"""A prefill of VoxCPM2 by content address is the host's by waveform, bit for bit.

Both sides run on the real talker of a tiny checkpoint. The host's side is its own route
for a clip that comes with the request, at the encoder's rate: how a clip gets there is
the official package's affair, and tested with the encoders.
"""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.voxcpm2 import voxcpm2_talker as host

from tests.audio_clips import voiced
from tests.families.voxcpm2.case import CASE
from tests.in_process_workers import prepare, ref_of, store_clip
from tests.real_talker import loaded_talker
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.voxcpm2 import prompt as prompts
from vllm_tts_cache.families.voxcpm2 import worker
from vllm_tts_cache.families.voxcpm2.family import CONTINUATION, FAMILY, REFERENCE
from vllm_tts_cache.families.voxcpm2.positions import SAMPLE_RATE_HZ, num_positions
from vllm_tts_cache.families.voxcpm2.prompt import PromptBuilder
from vllm_tts_cache.families.voxcpm2.worker import CachedVoxCPM2Talker
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_store

TEXT = "The keeper counts the ships, and then counts them again."
TRANSCRIPT = "What is said in the reference. 你好"
CHUNKS = (1, 7, 16, 64)
ABSENT = "0" * 64
MODES = pytest.mark.parametrize("mode", FAMILY.modes, ids=lambda mode: mode.name)


@pytest.fixture(scope="module")
def talker(voxcpm2_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("talker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(directory / "samples"))
        with loaded_talker(
            CASE,
            voxcpm2_checkpoint,
            directory,
            async_chunk=False,
            enable_prefix_caching=False,
        ) as model:
            yield model


@pytest.fixture(autouse=True)
def nothing_happened_before(talker):
    talker._failed_requests._ids.clear()
    talker._pending_requests.clear()
    talker._active_states.clear()


@pytest.fixture(scope="module")
def tokenizer(talker):
    return talker.tts.text_tokenizer.tokenizer


@pytest.fixture(scope="module")
def split_map(tokenizer):
    return host.build_cjk_split_map(tokenizer)


class Voice:
    """A clip whose encodings are in the worker's memory."""

    def __init__(self, talker, samples):
        self.audio = ReferenceAudio.of(samples, SAMPLE_RATE_HZ)
        self.ref = ref_of(self.audio)
        self.speakers = talker.tts_cache_speakers
        self.num_positions = num_positions(self.audio.num_samples, SAMPLE_RATE_HZ)
        store = open_store(load_settings())
        store_clip(store, self.audio)
        store.close()
        prepare(self.speakers, self.ref, FAMILY.encoders)

    def remember(self, mode, features):
        """Have the worker's memory hold this instead."""
        (encoder,) = mode.encoders
        key = EncodingKey(
            audio_sha256=self.ref.audio_sha256,
            encoder_fingerprint=self.speakers.fingerprints[encoder],
        )
        self.speakers.delete([self.ref.audio_sha256])
        memory = self.speakers._cache._memory
        encoding, since = Encoding({"features": features}), memory.num_deletes
        memory.put(key, encoding, Segment.REGISTERED, since=since)


def samples_of(seconds=3.3, pitch_hz=220.0):
    return voiced(SAMPLE_RATE_HZ, seconds, pitch_hz=pitch_hz)[:, 0]


@pytest.fixture
def voice(talker):
    return Voice(talker, samples_of())


@pytest.fixture
def ours(tokenizer, split_map):
    """Builds what the API process sends to speak with a voice."""
    builder = PromptBuilder(tokenizer, split_map)

    def build(voice, mode, text=TEXT, transcript=TRANSCRIPT, num_positions=None):
        return builder.clone(
            text,
            transcript,
            mode=mode,
            ref=voice.ref,
            num_positions=num_positions or voice.num_positions,
        )

    return build


@pytest.fixture
def hosts(talker, tokenizer, split_map):
    """Builds what stock sends: the waveform."""

    def build(voice, mode, text=TEXT, transcript=TRANSCRIPT):
        return host.build_voxcpm2_prompt(
            talker.config,
            tokenizer,
            split_map,
            text,
            ref_audio=voice.audio.samples.tolist(),
            ref_sr=SAMPLE_RATE_HZ,
            ref_text=transcript if mode is CONTINUATION else None,
        )

    return build


@torch.inference_mode()
def prefill(talker, prompt, *, chunk=None, request_id="request", **others: Any):
    """The embeddings of a prefill, in chunks, and the state that it leaves."""
    num_tokens = len(prompt["prompt_token_ids"])
    told = prompt["additional_information"]
    info = {**told, "_omni_prompt_len": num_tokens, **others}
    parts, start = [], 0
    while start < num_tokens:
        span = torch.ones(
            min(chunk or num_tokens, num_tokens - start), dtype=torch.long
        )
        ids, rows, update = talker.preprocess(
            span,
            None,
            **info,
            request_id=request_id,
            _omni_is_prefill=True,
            _omni_num_computed_tokens=start,
        )
        assert torch.equal(ids, span) and update == {}
        parts.append(rows)
        start += len(span)
    return torch.cat(parts), talker._active_states[request_id]


def assert_same(mine, theirs):
    (rows, state), (expected, expected_state) = mine, theirs
    assert rows.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(rows, expected)
    pairs = zip(state.prefill_masks, expected_state.prefill_masks, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert state.is_last_prefill_chunk and expected_state.is_last_prefill_chunk


def num_failed(talker):
    return talker.tts_cache_speakers.stats().failed_prompts


def test_the_registered_model_is_ours(talker):
    assert type(talker) is CachedVoxCPM2Talker


@MODES
@pytest.mark.parametrize("num_samples", [52_800, 51_200, 51_201, 1, 2_559])
def test_a_prefill_by_key_is_the_hosts_by_waveform(
    talker, ours, hosts, mode, num_samples
):
    voice = Voice(talker, samples_of(4.0)[:num_samples])
    mine, theirs = ours(voice, mode), hosts(voice, mode)
    assert mine["prompt_token_ids"] == theirs["prompt_token_ids"]
    assert_same(
        prefill(talker, mine, request_id="ours"),
        prefill(talker, theirs, request_id="hosts"),
    )


@MODES
@pytest.mark.parametrize("chunk", CHUNKS)
def test_so_it_is_in_chunks(talker, voice, ours, hosts, mode, chunk):
    assert_same(
        prefill(talker, ours(voice, mode), chunk=chunk, request_id="ours"),
        prefill(talker, hosts(voice, mode), request_id="hosts"),
    )


@MODES
def test_the_modes_and_voices_are_told_apart(talker, voice, ours, mode):
    other = Voice(talker, samples_of(pitch_hz=440.0))
    rows, _ = prefill(talker, ours(voice, mode))
    again, _ = prefill(talker, ours(voice, mode), request_id="again")
    others, _ = prefill(talker, ours(other, mode), request_id="other")
    assert torch.equal(rows, again)
    assert rows.shape == others.shape and not torch.equal(rows, others)


def test_no_prefill_encodes(talker, voice, ours, monkeypatch):
    monkeypatch.setattr(host, "_encode_raw_audio", None)
    monkeypatch.setattr(talker.tts, "build_prompt_cache", None)
    for mode in FAMILY.modes:
        prefill(talker, ours(voice, mode), request_id=mode.name)
    assert not talker._failed_requests._ids


def test_the_hosts_memory_of_names_is_not_asked(talker, voice, ours):
    """Stock's defect: what it kept under a name is of another mode or length."""
    expected, _ = prefill(talker, ours(voice, CONTINUATION), request_id="alone")
    prefill(talker, ours(voice, REFERENCE), request_id="named")
    rows, _ = prefill(talker, ours(voice, CONTINUATION), request_id="transcript")
    assert torch.equal(rows, expected)
    other = Voice(talker, samples_of(1.0))
    prefill(talker, ours(other, REFERENCE), request_id="inline")
    assert not talker._failed_requests._ids
    told = ours(other, REFERENCE)["additional_information"]
    assert set(told) == {FIELD, prompts.MODE, prompts.TEXT_IDS}


def test_a_text_without_a_speaker_is_the_hosts(talker, tokenizer, split_map):
    prompt = host.build_voxcpm2_prompt(talker.config, tokenizer, split_map, TEXT)
    expected, _ = prefill(talker, prompt)
    for chunk in CHUNKS:
        rows, _ = prefill(talker, prompt, chunk=chunk, request_id=f"by {chunk}")
        assert torch.equal(rows, expected)


def test_a_message_is_short_and_hardly_grows_with_the_clip(voice, ours):
    def num_bytes(num_positions):
        prompt = ours(voice, REFERENCE, num_positions=num_positions)
        return len(repr(prompt["additional_information"]))

    assert num_bytes(20) == num_bytes(375)
    assert num_bytes(20) < 600


# Requests that fail alone


def forced(talker, *request_ids):
    """Which of these requests can sample only the id that ends them as an error."""
    talker.set_batch_req_ids(request_ids)
    hidden = torch.randn(len(request_ids), talker.config.hidden_size)
    logits = talker.compute_logits(hidden)
    return [rid for rid, row in zip(request_ids, logits, strict=True) if ended(row)]


def ended(row):
    return row.isfinite().nonzero().flatten().tolist() == [FAMILY.failure_id]


SPOILED = {
    "no-encoding": {FIELD: [ABSENT, "registered"]},
    "no-address": {FIELD: ["no address", "registered"]},
    "no-speaker": {FIELD: None},
    "no-mode": {prompts.MODE: None},
    "other-mode": {prompts.MODE: "x_vector"},
    "the-mode-of-another-length": {prompts.MODE: CONTINUATION.name},
    "no-text": {prompts.TEXT_IDS: None},
    "other-text": {prompts.TEXT_IDS: [[200, 201]]},
    "no-ids": {prompts.TEXT_IDS: [["a", {}]]},
    "the-beginning-twice": {prompts.TEXT_IDS: [[1, 1, *range(200, 250)]]},
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_request_that_cannot_be_prefilled_fails_alone(
    talker, voice, ours, spoil, chunk
):
    before = num_failed(talker)
    prompt = ours(voice, REFERENCE)
    expected, _ = prefill(talker, prompt, request_id="alone")
    prefill(talker, prompt, chunk=chunk, **spoil)
    rows, state = prefill(talker, prompt, chunk=chunk, request_id="neighbour")
    assert torch.equal(rows, expected) and state.is_last_prefill_chunk
    assert num_failed(talker) == before + 1
    assert forced(talker, "neighbour", "request", "other") == ["request"]


@pytest.mark.parametrize(
    "change",
    [
        lambda features: features[:-1],
        lambda features: np.concatenate([features, features]),
        lambda features: features[:, :3],
        lambda features: features[:, :, :7],
        lambda features: features[0],
    ],
    ids=["one-less", "twice", "other-patches", "other-latents", "one-patch"],
)
@MODES
def test_features_that_do_not_fit_fail_their_request(talker, voice, ours, mode, change):
    (encoder,) = mode.encoders
    features = voice.speakers.prompt(voice.ref, mode.encoders)[encoder]["features"]
    voice.remember(mode, np.ascontiguousarray(change(features)))
    prefill(talker, ours(voice, mode))
    assert forced(talker, "neighbour", "request") == ["request"]


def test_a_failed_request_is_computed_and_nothing_is_made_of_it(talker, voice, ours):
    """Also in the step that asynchronous scheduling has planned already."""
    lost: Any = {FIELD: [ABSENT, "registered"]}
    prompt = ours(voice, REFERENCE)
    num_tokens = len(prompt["prompt_token_ids"])
    prefill(talker, prompt, chunk=32, **lost)
    _, row, _ = talker.preprocess(
        torch.tensor([FAMILY.failure_id]),
        None,
        **lost,
        request_id="request",
        _omni_is_prefill=False,
        _omni_num_computed_tokens=num_tokens,
    )
    assert row.shape == (1, talker.config.hidden_size) and not row.any()
    steps = [(rid, is_part, n) for rid, is_part, _, n in talker._pending_requests]
    assert {(rid, is_part) for rid, is_part, _ in steps} == {("request", True)}
    assert sum(n for *_, n in steps) == num_tokens + 1
    state = talker._active_states["request"]
    assert not state.prefill_completed and not state.is_last_prefill_chunk
    # As many rows for the second language model as for the first.
    for positions in (torch.arange(32), torch.tensor([num_tokens])):
        hidden = torch.randn(len(positions), talker.config.hidden_size).bfloat16()
        rows, _ = talker._prepare_residual_prefill(state, hidden, "cpu", positions)
        assert rows.shape == hidden.shape


def test_a_request_that_goes_on_after_a_preemption_ends_itself_only(
    talker, voice, ours
):
    """Reservation rules it out; stock's engine ended by it."""
    prompt = ours(voice, REFERENCE)
    longer = {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], 0, 0]}
    prefill(talker, longer, _omni_prompt_len=len(prompt["prompt_token_ids"]))
    assert forced(talker, "request") == ["request"]


def test_only_two_ids_are_ever_sampled(talker):
    logits = talker.compute_logits(torch.randn(3, talker.config.hidden_size))
    talker._results_queue = [("request", torch.tensor([[0.1, 0.2]]))]
    sampled = talker.compute_logits(torch.randn(1, talker.config.hidden_size))
    for row in (*logits, *sampled):
        assert set(row.isfinite().nonzero().flatten().tolist()) <= {0, 1}
    assert FAMILY.failure_id not in (0, 1)


# What is said at the start


def started(**cache):
    return worker._check(SimpleNamespace(cache_config=SimpleNamespace(**cache)))


def test_without_the_official_package_one_line_says_what_to_install(
    monkeypatch, plugin_log
):
    monkeypatch.setitem(sys.modules, "voxcpm.core", None)
    with pytest.raises(ConfigError, match="pip install 'voxcpm"):
        started(enable_prefix_caching=False)
    (line,) = plugin_log.messages
    assert "pip install" in line and "\n" not in line


def test_prefix_caching_is_refused_for_it_would_mix_up_voices(plugin_log):
    with pytest.raises(ConfigError, match="enable_prefix_caching: false"):
        started(enable_prefix_caching=True)
    started(enable_prefix_caching=False)
    assert len(plugin_log.messages) == 1


# What we rely on


def test_seam_a_text_that_begins_with_the_beginning_ends_the_hosts_engine(
    talker, tokenizer, split_map
):
    prompt = host.build_voxcpm2_prompt(talker.config, tokenizer, split_map, "<s>Hi")
    with pytest.raises(ValueError, match="exceeds the constructed prompt"):
        prefill(talker, prompt)


def test_seam_the_host_gives_only_some_steps_to_its_second_language_model():
    """Its attention is told of all of them: what is missing was read past the end."""
    source = inspect.getsource(host.VoxCPM2TalkerForConditionalGeneration.forward)
    assert source.count("residual_inputs.append(") == 3
    passed_over = source.partition("            else:\n                flush_decode")[2]
    assert "self._results_queue.append((req_id, None))" in passed_over
