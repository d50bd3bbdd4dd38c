"""Speech of OmniVoice by content address is the host's by waveform, bit for bit.

Both run on the real pipeline of a tiny checkpoint. The host's side is its own route for
a clip, with one that the official package encodes as it is: how others get there is
tested with the encoder.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_omni.diffusion.models.omnivoice.pipeline_omnivoice import OmniVoicePipeline
from vllm_omni.errors import OmniClientError

from benchmarks.gpu_check.other_device import another_device
from tests.audio_clips import voiced
from tests.families.runner import ABSENT, UNKNOWN, StoredVoice
from tests.real_pipeline import batch, one_step_at_a_time
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.families.omnivoice.preparation import LOUDNESS
from vllm_tts_cache.model_executor.failed_requests import REASON
from vllm_tts_cache.speaker.reference import FIELD, REQUEST_FIELD

RATE_HZ = 24_000
TEXT = "The keeper counts the ships."
TRANSCRIPT = "What is said in it."


class Voice(StoredVoice):
    def __init__(self, pipeline, samples):
        speakers = pipeline.tts_cache_speakers
        super().__init__(speakers, samples, RATE_HZ, FAMILY.encoders)

    @property
    def rms(self):
        return float(self.encodings["codec"]["rms"][0])


def samples_of(pitch_hz=220.0, peak=0.5, num_frames=50):
    """Of 16 bits, of whole frames and without silence; its RMS is half its peak."""
    samples = voiced(RATE_HZ, num_frames / 25, peak=peak, pitch_hz=pitch_hz)[:, 0]
    return np.round(samples * 32_767).astype(np.float32) / 32_768


@pytest.fixture
def voice(pipeline):
    return Voice(pipeline, samples_of())


def ours(voice, text=TEXT, **more):
    named = {FIELD: voice.ref.to_wire(), "ref_text": TRANSCRIPT}
    return {"input": text, **named, **more}


def hosts(voice, text=TEXT, **more):
    clip = voice.audio.samples.copy(), RATE_HZ
    return {"input": text, "ref_audio": clip, "ref_text": TRANSCRIPT, **more}


def absent(**more):
    return {"input": TEXT, "ref_text": TRANSCRIPT, **UNKNOWN, **more}


@torch.inference_mode()
def spoken(pipeline, *prompts, **params):
    return pipeline.forward(batch(*prompts, **params))


@torch.inference_mode()
def spoken_by_the_hosts(pipeline, *prompts) -> Any:
    """As loud as it is before ours makes it quieter."""
    request: Any = batch(*prompts)
    return OmniVoicePipeline.forward(pipeline, request)


def audio(pipeline, prompt):
    (output,) = spoken(pipeline, prompt)
    assert output.error is None
    return output.output


def stats(pipeline):
    return pipeline.tts_cache_speakers.stats()


@pytest.mark.parametrize("more", [{}, {"lang": "en"}, {"instruct": "male, low pitch"}])
def test_speech_by_address_is_the_hosts_by_waveform(pipeline, voice, more):
    mine, theirs = ours(voice, **more), hosts(voice, **more)
    extra = {"seed": 7}
    with torch.inference_mode():
        one = pipeline._prepare_request_input(mine, extra)
        other = pipeline._prepare_request_input(theirs, extra)
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.audio_mask, other.audio_mask)
    assert (one.cond_len, one.target_len) == (other.cond_len, other.target_len)
    assert torch.equal(audio(pipeline, mine), audio(pipeline, theirs))


def test_on_another_device_its_input_is_the_same(pipeline, voice, monkeypatch):
    expected = pipeline._prepare_request_input(ours(voice), {})
    with another_device() as device:
        monkeypatch.setattr(pipeline, "device", device)
        made = pipeline._prepare_request_input(ours(voice), {})
        for name in ("input_ids", "audio_mask"):
            assert getattr(made, name).device == device
            assert torch.equal(getattr(made, name).cpu(), getattr(expected, name))


def test_nothing_is_encoded_while_a_batch_is_computed(pipeline, voice, monkeypatch):
    """The host encodes it there, and all of the batch waits."""
    other = Voice(pipeline, samples_of(330.0))

    def refuse(*_, **__):
        raise AssertionError("the host's encoder")

    monkeypatch.setattr(pipeline.audio_tokenizer, "encode", refuse)
    heard = spoken(pipeline, ours(voice), {"input": TEXT}, ours(other))
    assert [output.error for output in heard] == [None] * 3
    (by_waveform,) = spoken(pipeline, hosts(voice))
    assert "the host's encoder" in by_waveform.error


def test_an_answer_is_as_long_as_the_hosts_whatever_the_reference(pipeline, voice):
    """A transcript that is too short for its clip would otherwise make it endless."""
    plain, clone = audio(pipeline, {"input": TEXT}), audio(pipeline, ours(voice))
    brief = audio(pipeline, ours(voice, ref_text="a."))
    assert plain.shape == clone.shape == brief.shape


@pytest.mark.parametrize("peak", [0.01, 0.1, 0.19])
def test_an_answer_is_as_quiet_as_its_reference(pipeline, peak):
    quiet = Voice(pipeline, samples_of(peak=peak))
    rms = quiet.rms
    assert 0 < rms < LOUDNESS
    (loud,) = spoken_by_the_hosts(pipeline, ours(quiet))
    assert torch.equal(audio(pipeline, ours(quiet)), loud.output * rms / LOUDNESS)


def test_in_a_batch_each_is_as_loud_as_its_own_reference(pipeline, voice):
    quiet = Voice(pipeline, samples_of(peak=0.02))
    prompts = [ours(voice), absent(), {"input": TEXT}, ours(quiet)]
    plain = spoken_by_the_hosts(pipeline, *prompts)
    heard = spoken(pipeline, *prompts)
    gain = quiet.rms / LOUDNESS
    for number, factor in ((0, 1.0), (2, 1.0), (3, gain)):
        expected = plain[number].output * factor
        assert torch.allclose(heard[number].output, expected, rtol=1e-5, atol=0)


def test_of_a_batch_only_the_request_without_its_reference_fails(pipeline, voice):
    before = stats(pipeline)
    alone = audio(pipeline, ours(voice))
    failed, well = spoken(pipeline, absent(**{REQUEST_FIELD: "speech-1"}), ours(voice))
    assert (failed.output, failed.error) == (None, REASON)
    assert well.error is None and torch.equal(well.output, alone)
    after = stats(pipeline)
    assert after.failed_prompts == before.failed_prompts + 1
    assert after.prompts == before.prompts + 2
    causes = pipeline.tts_cache_speakers.failed(["speech-1", "speech-2"])
    assert causes == {"speech-1": "its codec encoding is not stored"}


BROKEN = {
    "no address": {FIELD: ["x", "registered"]},
    "no segment": {FIELD: [ABSENT, "nobody's"]},
    "no list": {FIELD: 7},
    "no waveform": {"ref_audio": ("nonsense",)},
    "no audio": {"ref_audio": 5},
    "no rate": {"ref_audio": (np.zeros(9_600, np.float32), "fast")},
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_request_that_is_broken_fails_alone(pipeline, voice, what):
    """An exception here failed stock's whole batch."""
    failed, well = spoken(pipeline, {"input": TEXT, **BROKEN[what]}, ours(voice))
    assert failed.error and failed.output is None
    assert well.error is None and well.output is not None


@pytest.mark.parametrize("wrong", [{"ref_text": 5}, {"input": 5}])
def test_a_clone_that_the_host_fails_is_not_told_of_its_prompt(pipeline, voice, wrong):
    """It was made and submitted once more, to fail once more."""
    before = stats(pipeline).failed_prompts
    broken = ours(voice, **{REQUEST_FIELD: "speech-3", **wrong})
    failed, well = spoken(pipeline, broken, ours(voice))
    assert failed.error and failed.error != REASON
    assert well.error is None
    assert stats(pipeline).failed_prompts == before
    assert pipeline.tts_cache_speakers.failed(["speech-3"]) == {}


@pytest.mark.parametrize(
    ("shape", "code"),
    [((50, 4), 0), ((50,), 0), ((0, 8, 1), 0), ((50, 8), 1024), ((50, 8), -1)],
)
def test_codes_of_another_model_fail_one_request(pipeline, shape, code):
    voice = Voice(pipeline, samples_of(pitch_hz=280.0))  # no other test's
    codes = np.full(shape, code, np.int16)
    voice.remember(codec={"codes": codes, "rms": np.array([0.2], np.float32)})
    failed, well = spoken(pipeline, ours(voice), {"input": TEXT})
    assert failed.error == REASON
    assert well.error is None


def test_too_little_memory_on_a_rank_is_no_requests_error(pipeline, voice, monkeypatch):
    """The others know nothing of it, and would go on with the request."""

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pipeline.tts_cache_speakers, "prompt", fail)
    (failed,) = spoken(pipeline, ours(voice))
    assert failed.error == REASON
    monkeypatch.setattr(
        pipeline.tts_cache_speakers, "ranks", SimpleNamespace(are_several=True)
    )
    with pytest.raises(torch.OutOfMemoryError):
        spoken(pipeline, ours(voice))


@torch.inference_mode()
def test_a_step_at_a_time_the_same_is_prepared_and_as_loud(pipeline):
    quiet = Voice(pipeline, samples_of(peak=0.02))
    state = pipeline.prepare_encode(one_step_at_a_time(ours(quiet)))
    whole = pipeline._prepare_request_input(ours(quiet), {"seed": 7})
    assert torch.equal(state.latents, whole.input_ids)
    state.extra["tokens"] = torch.zeros_like(state.extra["tokens"])
    loud: Any = OmniVoicePipeline.post_decode(pipeline, state).output
    rms = quiet.rms
    heard = pipeline.post_decode(state).output
    assert torch.equal(heard, loud * rms / LOUDNESS)


def test_a_step_at_a_time_a_request_without_its_prompt_is_refused(pipeline, voice):
    with pytest.raises(OmniClientError, match="speaker prompt"):
        pipeline.prepare_encode(one_step_at_a_time(absent()))
    state = pipeline.prepare_encode(one_step_at_a_time(ours(voice)))
    assert state.extra["cond_len"] > state.extra["target_len"]


def test_weights_that_are_loaded_again_load_no_encoder_again(pipeline):
    speakers, fingerprints = (
        pipeline.tts_cache_speakers,
        pipeline.tts_cache_speakers.fingerprints,
    )
    pipeline.load_weights(())
    assert pipeline.tts_cache_speakers is speakers
    assert speakers.fingerprints is fingerprints
