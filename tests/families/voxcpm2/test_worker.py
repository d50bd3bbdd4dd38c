"""A prefill of VoxCPM2 by content address is the host's by waveform, bit for bit.

Both sides run on the real talker of a tiny checkpoint. The host's side is its own route
for a clip that comes with the request, at the encoder's rate: how a clip gets there is
the official package's affair, and tested with the encoders.
"""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.voxcpm2 import voxcpm2_talker as host

from tests.audio_clips import voiced
from tests.families import runner
from tests.families.runner import prefill as by_the_runner
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.voxcpm2 import prompt as prompts
from vllm_tts_cache.families.voxcpm2 import worker
from vllm_tts_cache.families.voxcpm2.family import CONTINUATION, FAMILY, REFERENCE
from vllm_tts_cache.families.voxcpm2.positions import SAMPLE_RATE_HZ, num_positions
from vllm_tts_cache.families.voxcpm2.prompt import PromptBuilder

TEXT = "The keeper counts the ships, and then counts them again."
TRANSCRIPT = "What is said in the reference. 你好"
CHUNKS = (1, 7, 16, 64)
MODES = pytest.mark.parametrize("mode", FAMILY.modes, ids=lambda mode: mode.name)


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


class Voice(runner.StoredVoice):
    def __init__(self, talker, samples):
        speakers = talker.tts_cache_speakers
        super().__init__(speakers, samples, SAMPLE_RATE_HZ, FAMILY.encoders)
        self.num_positions = num_positions(self.audio.num_samples, SAMPLE_RATE_HZ)


def samples_of(seconds=3.3, pitch_hz=220.0):
    return voiced(SAMPLE_RATE_HZ, seconds, pitch_hz=pitch_hz)[:, 0]


@pytest.fixture
def voice(talker):
    return Voice(talker, samples_of())


@pytest.fixture
def ours(tokenizer, split_map):
    """Builds what the API process sends to speak with a voice."""
    builder = PromptBuilder(tokenizer, split_map)

    def build(voice, mode, text=TEXT, transcript=TRANSCRIPT):
        return builder.clone(text, transcript, mode=mode, clip=voice)

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


def prefill(talker, prompt, *, chunk=None, request_id="request", **others: Any):
    """The embeddings of a prefill, in chunks, and the state that it leaves."""
    told = prompt["additional_information"]
    info = {**told, **others}
    ids = torch.ones(len(prompt["prompt_token_ids"]), dtype=torch.long)
    rows, kept = by_the_runner(
        talker.preprocess, ids, info, chunk=chunk, name=request_id
    )
    assert kept == info
    return rows, talker._active_states[request_id]


def assert_same(mine, theirs):
    (rows, state), (expected, expected_state) = mine, theirs
    assert rows.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(rows, expected)
    pairs = zip(state.prefill_masks, expected_state.prefill_masks, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert state.is_last_prefill_chunk and expected_state.is_last_prefill_chunk


@MODES
@pytest.mark.parametrize("num_samples", [52_800, 51_200, 51_201, 1, 2_559])
def test_a_prefill_by_key_is_one_by_waveform(talker, ours, hosts, mode, num_samples):
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


def test_a_text_without_a_speaker_is_the_hosts(talker, tokenizer, split_map):
    prompt = host.build_voxcpm2_prompt(talker.config, tokenizer, split_map, TEXT)
    expected, _ = prefill(talker, prompt)
    for chunk in CHUNKS:
        rows, _ = prefill(talker, prompt, chunk=chunk, request_id=f"by {chunk}")
        assert torch.equal(rows, expected)


def failing(talker, *names):
    size = talker.config.hidden_size
    return runner.forced(talker, FAMILY.failure_id, size, names, torch.float32)


SPOILED = {
    **runner.UNNAMED,
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
def test_a_request_without_a_prefill_fails_alone(talker, voice, ours, spoil, chunk):
    before = runner.num_failed(talker)
    prompt = ours(voice, REFERENCE)
    expected, _ = prefill(talker, prompt, request_id="alone")
    prefill(talker, prompt, chunk=chunk, **spoil)
    rows, state = prefill(talker, prompt, chunk=chunk, request_id="neighbour")
    assert torch.equal(rows, expected) and state.is_last_prefill_chunk
    assert runner.num_failed(talker) == before + 1
    assert failing(talker, "neighbour", "request", "other") == ["request"]


MISFITS = {
    "one-less": lambda features: features[:-1],
    "twice": lambda features: np.concatenate([features, features]),
    "other-patches": lambda features: features[:, :3],
    "other-latents": lambda features: features[:, :, :7],
    "one-patch": lambda features: features[0],
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
@MODES
def test_features_that_do_not_fit_fail_their_request(talker, voice, ours, mode, change):
    (encoder,) = mode.encoders
    features = change(voice.encodings[encoder]["features"])
    voice.remember(**{encoder: {"features": features}})
    prefill(talker, ours(voice, mode))
    assert failing(talker, "neighbour", "request") == ["request"]


def test_a_failed_request_is_computed_and_nothing_is_made_of_it(talker, voice, ours):
    """Also in the step that asynchronous scheduling has planned already."""
    prompt = ours(voice, REFERENCE)
    num_tokens = len(prompt["prompt_token_ids"])
    prefill(talker, prompt, chunk=32, **runner.UNKNOWN)
    _, row, _ = talker.preprocess(
        torch.tensor([FAMILY.failure_id]),
        None,
        **runner.UNKNOWN,
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


def test_a_request_that_goes_on_after_preemption_ends_itself_only(talker, voice, ours):
    """Reservation rules it out; stock's engine ended by it."""
    prompt = ours(voice, REFERENCE)
    num_tokens = len(prompt["prompt_token_ids"])
    said = runner.as_the_runner_says("request", 0, num_tokens)
    ids = torch.ones(num_tokens + 2, dtype=torch.long)
    talker.preprocess(ids, None, **prompt["additional_information"], **said)
    assert failing(talker, "request") == ["request"]


def test_only_two_ids_are_ever_sampled(talker):
    logits = talker.compute_logits(torch.randn(3, talker.config.hidden_size))
    talker._results_queue = [("request", torch.tensor([[0.1, 0.2]]))]
    sampled = talker.compute_logits(torch.randn(1, talker.config.hidden_size))
    for row in (*logits, *sampled):
        assert set(row.isfinite().nonzero().flatten().tolist()) <= {0, 1}
    assert FAMILY.failure_id not in (0, 1)


def test_without_the_official_package_a_line_says_what_to_add(monkeypatch, plugin_log):
    monkeypatch.setitem(sys.modules, "voxcpm.core", None)
    with pytest.raises(ConfigError, match="pip install 'voxcpm"):
        worker.CachedVoxCPM2Talker(vllm_config=SimpleNamespace())
    (line,) = plugin_log.messages
    assert "pip install" in line and "\n" not in line


@pytest.mark.parametrize("chunk", [None, 4])
def test_one_the_host_builds_wrong_fails_alone(talker, tokenizer, split_map, chunk):
    """Too short ended stock's engine by an error, too long by writing past memory."""
    begun = host.build_voxcpm2_prompt(talker.config, tokenizer, split_map, "<s>Hi")
    told = {"text_token_ids": [[5] * 12]}  # as plain ids that begin with another one
    bare = {"prompt_token_ids": [5] * 12, "additional_information": told}
    for name, prompt in (("begun", begun), ("bare", bare)):
        num_tokens = len(prompt["prompt_token_ids"])
        prefill(talker, prompt, request_id=name, chunk=chunk)
        assert name in talker._failed_requests
        noted = [n for rid, _, _, n in talker._pending_requests if rid == name]
        assert sum(noted) == num_tokens, "each row once"
        assert not talker._active_states[name].is_last_prefill_chunk
