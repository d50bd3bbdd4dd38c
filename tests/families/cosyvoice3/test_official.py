"""Our encodings are the official front end's, bit for bit on a CPU."""

import itertools

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.cosyvoice3 import utils as host

from tests.families.clip import Clip
from tests.families.cosyvoice3 import official
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.cosyvoice3 import encoders as ours
from vllm_tts_cache.families.cosyvoice3 import features
from vllm_tts_cache.families.cosyvoice3.positions import used_tokens
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

CPU = torch.device("cpu")


# Lengths: the shortest allowed, primes, whole tokens, one sample more and one less, and
# the longest allowed.
CLIPS = (
    Clip(16_000, 16_001, 1, "FLOAT"),
    Clip(16_000, 17_920),
    Clip(16_000, 20_479, 2, "PCM_24"),
    Clip(16_000, 480_000),
    Clip(22_050, 23_173, 2),
    Clip(22_050, 231_529, 1, "FLOAT"),
    Clip(24_000, 24_000),
    Clip(24_000, 48_001, 2, "PCM_24"),
    Clip(24_000, 26_880, 2, "FLOAT"),
    Clip(32_000, 64_007),
    Clip(44_100, 44_101),
    Clip(44_100, 49_392, 2, "PCM_24"),
    Clip(44_100, 463_050, 1, "FLOAT"),
    Clip(48_000, 48_017, 1, "PCM_24"),
    Clip(48_000, 96_001, 2),
    Clip(96_000, 191_999, 1, "PCM_24"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the encode thread has: sums over several are shared otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def encoders(cosyvoice3_checkpoint):
    return ours.load_reference_encoders(cosyvoice3_checkpoint, CPU)


def encoded(encoders, name, path):
    return encoders[name].encode(decode_path(path).audio)[name]


@pytest.mark.parametrize("name", official.ENCODINGS)
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.stem)
def test_encodings_equal_the_official_ones(
    clip, name, cosyvoice3_checkpoint, encoders, tmp_path
):
    path = clip.write(tmp_path)
    expected = official.ENCODINGS[name](cosyvoice3_checkpoint, path)
    found = encoded(encoders, name, path)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", official.ENCODINGS)
@pytest.mark.parametrize("clip", [SPEECH, OTHER_SPEECH], ids=["speech", "other"])
def test_encodings_of_speech_equal_the_official_ones(
    clip, name, cosyvoice3_checkpoint, encoders
):
    expected = official.ENCODINGS[name](cosyvoice3_checkpoint, clip.path)
    assert np.array_equal(encoded(encoders, name, clip.path), expected)


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.stem)
def test_as_many_tokens_and_frames_are_used_as_officially(
    clip, cosyvoice3_checkpoint, encoders, tmp_path
):
    path = clip.write(tmp_path)
    tokens = encoded(encoders, "speech_tokens", path)
    frames = encoded(encoders, "mel", path)
    expected, expected_frames = official.used(tokens, frames)
    num_used = used_tokens(len(tokens), len(frames))
    assert num_used == len(expected)
    assert 2 * num_used == len(expected_frames)


# What the comparison is worth


def test_the_hosts_filter_bank_would_be_noticed(encoders, monkeypatch):
    """It is 3e-6 off."""
    expected = encoded(encoders, "mel", SPEECH.path)

    def hosts_bank(rate_hz, num_fft, num_mels):
        return host._get_mel_basis(rate_hz, num_fft, num_mels, 0.0, None, "cpu")

    monkeypatch.setattr(features, "_filters", hosts_bank)
    found = encoded(encoders, "mel", SPEECH.path)
    assert not np.array_equal(found, expected)
    assert np.allclose(found, expected, atol=1e-3)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # the host's resampler asks
def test_resampling_twice_as_the_host_does_would_be_noticed(
    encoders, monkeypatch, tmp_path
):
    from vllm.multimodal.audio import AudioResampler

    path = Clip(44_100, 44_101).write(tmp_path)
    once = encoded(encoders, "speaker", path)
    plain = features.waveform

    def twice(audio, rate_hz):
        parser = AudioResampler(target_sr=24_000)
        at_24 = parser.resample(audio.samples.copy(), orig_sr=audio.sample_rate_hz)
        return plain(type(audio).of(np.asarray(at_24, np.float32), 24_000), rate_hz)

    monkeypatch.setattr(features, "waveform", twice)
    again = encoded(encoders, "speaker", path)
    assert not np.array_equal(once, again)
    assert np.allclose(once, again, atol=0.1)


def test_the_test_checkpoint_tells_clips_apart(encoders):
    """Otherwise the comparisons above would hold for any encoder."""
    one, other = (
        {name: encoded(encoders, name, clip.path) for name in encoders}
        for clip in (SPEECH, OTHER_SPEECH)
    )
    for name, array in one.items():
        length = min(len(array), len(other[name]))
        assert not np.array_equal(array[:length], other[name][:length])
    codes = np.concatenate([one["speech_tokens"], other["speech_tokens"]])
    assert len(np.unique(codes)) > len(codes) // 3
    shared = [len(np.unique(a["speech_tokens"])) for a in (one, other)]
    assert min(shared) > 10
    vectors = [
        each["speaker"] / np.linalg.norm(each["speaker"]) for each in (one, other)
    ]
    assert vectors[0] @ vectors[1] < 0.9999
    assert all(
        np.isfinite(a).all() for a in itertools.chain(*map(dict.values, (one, other)))
    )
