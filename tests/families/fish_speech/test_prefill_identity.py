"""What is Fish Speech's own of a prefill: real codes, decoding, the other runner."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.fish_speech import dac_encoder
from vllm_omni.model_executor.models.fish_speech import fish_speech_slow_ar as host

from tests.families.fish_speech.voices import Bench, Voice
from tests.families.runner import UNKNOWN, StoredVoice
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.fish_speech.family import CODEC, FAMILY
from vllm_tts_cache.families.fish_speech.worker import CachedFishSpeechSlowAR
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.testing.clips import SPEECH


@pytest.fixture
def bench(talker, own_checkpoint):
    talker._failed_requests._ids.clear()
    return Bench(talker, own_checkpoint)


def test_a_prefill_from_real_audio_is_the_hosts(talker, bench):
    audio = decode_path(SPEECH.path).audio
    speakers = talker.tts_cache_speakers
    real = StoredVoice(speakers, audio.samples, audio.sample_rate_hz, (CODEC,))
    voice = Voice(talker, np.array(real.encodings[CODEC]["codes"]))
    info = {**voice.info, FIELD: real.ref.to_wire()}
    (rows,) = bench.rows([("request", voice, 0, len(voice.ids), info)])
    assert torch.equal(rows, *bench.hosts(voice))
    assert dac_encoder._codec_cache == {}, "no encoder of the host's is loaded"


def test_decoding_is_the_hosts(talker):
    token = torch.tensor([talker._semantic_begin_id + 7], dtype=torch.int32)
    last = torch.randn(256, dtype=torch.bfloat16)
    _, row, update = talker.preprocess(
        token,
        None,
        request_id="request",
        hidden_states={"last": last},
        _omni_is_prefill=False,
    )
    assert torch.equal(row, talker.embed_input_ids(token).bfloat16())
    assert torch.equal(update["mtp_inputs"][0].flatten(), last)


def ended(row):
    return row.isfinite().nonzero().flatten().tolist() == [FAMILY.failure_id]


def test_nothing_else_can_sample_the_id_that_ends_a_request(talker):
    assert not talker._semantic_allowed_mask[FAMILY.failure_id]
    assert talker._semantic_allowed_mask.sum() == 4_096 + 1
    logits = talker.compute_logits(torch.randn(3, 256, dtype=torch.bfloat16))
    assert (logits[:, FAMILY.failure_id] == float("-inf")).all()


def test_the_other_runner_names_a_request_and_its_rows_in_its_own_way(talker, bench):
    voice = bench.voice()
    info = {**voice.info, **UNKNOWN, "req_id": "mine"}
    talker.preprocess(
        voice.ids, None, **info, _omni_is_prefill=True, _omni_num_computed_tokens=0
    )
    hidden = torch.randn(2, 256, dtype=torch.bfloat16)
    counts = torch.zeros(2, dtype=torch.long)
    with talker.mrv2_sampling_context(
        req_ids=["mine", "neighbour"], num_output_tokens=counts
    ):
        logits = talker.compute_logits(hidden)
    assert [ended(row) for row in logits] == [True, False]
    # What is computed outside of sampling, log-probabilities of a prompt, stays.
    assert not any(ended(row) for row in talker.compute_logits(hidden))


@pytest.mark.parametrize("is_other_runner", [True, False])
def test_only_the_other_runner_is_asked_to_name_the_rows(monkeypatch, is_other_runner):
    """The v1 runner would gather all output ids in each step for the same flag."""
    host_class = host.FishSpeechSlowARForConditionalGeneration
    monkeypatch.setattr(
        host_class, "__init__", lambda self, **_: torch.nn.Module.__init__(self)
    )
    model_config = SimpleNamespace(use_v2_model_runner=is_other_runner)
    model = CachedFishSpeechSlowAR(
        vllm_config=SimpleNamespace(model_config=model_config)
    )
    asks = getattr(model, "logitsprocs_need_output_token_ids", False)
    assert asks is is_other_runner
