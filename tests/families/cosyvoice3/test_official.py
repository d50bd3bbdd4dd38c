"""What is used of our encodings is what the official front end uses.

And what the comparison of them is worth, which is in the shared `test_official`.
"""

import numpy as np
import pytest
from vllm_omni.model_executor.models.cosyvoice3 import utils as host

from tests.families.clip import Clip
from tests.families.cosyvoice3 import official
from tests.torch_threads import on_threads
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.cosyvoice3 import features
from vllm_tts_cache.families.cosyvoice3.positions import used_tokens
from vllm_tts_cache.testing.clips import SPEECH


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the encode thread has: sums over several are shared otherwise."""
    with on_threads(1):
        yield


def encoded(encoders, name, path):
    return encoders[name].encode(decode_path(path).audio)[name]


@pytest.mark.parametrize("clip", official.CLIPS, ids=lambda clip: clip.stem)
def test_as_many_tokens_and_frames_are_used_as_officially(clip, encoders, tmp_path):
    path = clip.write(tmp_path)
    tokens = encoded(encoders, "speech_tokens", path)
    frames = encoded(encoders, "mel", path)
    expected, expected_frames = official.used(tokens, frames)
    num_used = used_tokens(len(tokens), len(frames))
    assert num_used == len(expected)
    assert 2 * num_used == len(expected_frames)


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
