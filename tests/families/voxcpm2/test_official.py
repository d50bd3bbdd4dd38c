"""What voxcpm 2.0.3 keeps of a clip is ours as well, and what the comparison is worth.

That of clips is in the shared `test_official`.
"""

import numpy as np
import pytest
import soxr
from vllm.multimodal.audio import AudioResampler
from voxcpm.model.voxcpm2 import VoxCPM2Model

from tests.families.clip import Clip
from tests.families.conftest import load
from tests.families.voxcpm2 import official
from tests.families.voxcpm2.case import CASE
from tests.torch_threads import on_threads
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.voxcpm2 import encoders as ours
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.testing.clips import SPEECH
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These networks are too small to share."""
    with on_threads(1):
        yield


@pytest.fixture(scope="module")
def model(own_checkpoint) -> VoxCPM2Model:
    return official.load(own_checkpoint)


def features(encoder, path):
    return encoder.encode(decode_path(path).audio)["features"]


def test_what_the_official_package_keeps_for_a_prompt_equals_ours(model, encoders):
    cache = model.build_prompt_cache(
        prompt_text="What was said in it.",
        prompt_wav_path=str(SPEECH.path),
        reference_wav_path=str(SPEECH.path),
    )
    for name, kept in (("reference", "ref_audio_feat"), ("continuation", "audio_feat")):
        expected = cache[kept].numpy()
        assert np.array_equal(features(encoders[name], SPEECH.path), expected)


@pytest.mark.slow
def test_features_equal_the_official_ones_with_the_released_sizes(tmp_path):
    checkpoint = TinyCheckpoint.of(FAMILY, encoders="real").write(tmp_path / "real")
    model = official.load(checkpoint)
    encoders = load(CASE, checkpoint)
    path = Clip(44_100, 45_865, 2, "PCM_24").write(tmp_path)
    for name in official.SIDES:
        expected = official.features(model, path, name)
        assert np.array_equal(features(encoders[name], path), expected)
    (checkpoint / "audiovae.pth").unlink()  # 0.2 GB, which pytest would keep


# What the comparison is worth


def host_resample(audio, rate_hz):
    resampler = AudioResampler(target_sr=rate_hz)
    return resampler.resample(audio.samples.copy(), orig_sr=audio.sample_rate_hz)


def other_quality(audio, rate_hz):
    rates = audio.sample_rate_hz, rate_hz
    return soxr.resample(audio.samples, *rates, quality="VHQ")


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # the host's resampler asks
@pytest.mark.parametrize("wrong", [host_resample, other_quality])
@pytest.mark.parametrize("rate_hz", [8_000, 24_000, 44_100])
def test_another_resampler_would_be_noticed(
    wrong, rate_hz, model, encoders, tmp_path, monkeypatch
):
    path = Clip(rate_hz, 2 * rate_hz).write(tmp_path)
    expected = official.features(model, path, "reference")
    assert np.array_equal(features(encoders["reference"], path), expected)
    monkeypatch.setattr(ours, "resample", wrong)
    found = features(encoders["reference"], path)
    assert found.shape == expected.shape
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize("name", official.SIDES)
def test_the_other_side_to_fill_up_would_be_noticed(name, model, encoders):
    (other,) = official.SIDES.keys() - {name}
    expected = official.features(model, SPEECH.path, name)
    found = features(encoders[other], SPEECH.path)
    assert found.shape == expected.shape
    assert np.any(found != expected, axis=(1, 2)).all()
