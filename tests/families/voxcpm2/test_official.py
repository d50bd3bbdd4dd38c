"""Our features are those of voxcpm 2.0.3, bit for bit on a CPU."""

import numpy as np
import pytest
import soxr
import torch
from torch.nn.functional import cosine_similarity
from vllm.multimodal.audio import AudioResampler
from voxcpm.model.voxcpm2 import VoxCPM2Model

from tests.families.clip import Clip
from tests.families.voxcpm2.written import write_voxcpm2_checkpoint
from tests.torch_threads import on_threads
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.voxcpm2 import encoders as ours
from vllm_tts_cache.families.voxcpm2.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

CPU = torch.device("cpu")
# Where the official package fills a clip up, by our encoders' names.
SIDES = {"reference": "right", "continuation": "left"}


# Lengths: the shortest allowed, primes, whole positions, one sample more and one less,
# 30 s less a sample. At 8,463 Hz 33,852 samples are exactly 25 positions, which
# floating point makes a sample longer, so 26.
CLIPS = (
    Clip(8_000, 8_000),
    Clip(8_000, 12_801, 2),
    Clip(8_000, 16_411, 1, "FLOAT"),
    Clip(8_463, 33_852),
    Clip(11_025, 55_127, 2, "PCM_24"),
    Clip(16_000, 16_001, 1, "FLOAT"),
    Clip(16_000, 17_920),
    Clip(16_000, 20_479, 2, "PCM_24"),
    Clip(16_000, 479_999),
    Clip(22_050, 23_173, 2),
    Clip(22_050, 66_150, 1, "PCM_24"),
    Clip(22_050, 231_529, 1, "FLOAT"),
    Clip(24_000, 24_000),
    Clip(24_000, 48_001, 2, "PCM_24"),
    Clip(24_000, 26_880, 2, "FLOAT"),
    Clip(44_100, 44_101),
    Clip(44_100, 49_392, 2, "PCM_24"),
    Clip(44_100, 463_050, 1, "FLOAT"),
    Clip(48_000, 48_017, 1, "PCM_24"),
    Clip(48_000, 53_760, 2, "FLOAT"),
    Clip(48_000, 96_001, 2),
    Clip(96_000, 191_999, 1, "PCM_24"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These networks are too small to share."""
    with on_threads(1):
        yield


@pytest.fixture(scope="module")
def model(voxcpm2_checkpoint) -> VoxCPM2Model:
    return load_official(voxcpm2_checkpoint)


def load_official(checkpoint) -> VoxCPM2Model:
    return VoxCPM2Model.from_local(str(checkpoint), optimize=False, device="cpu")


@torch.inference_mode()
def official_features(model, path, name):
    return model._encode_wav(str(path), padding_mode=SIDES[name]).numpy()


@pytest.fixture(scope="module")
def encoders(voxcpm2_checkpoint):
    return ours.load_reference_encoders(voxcpm2_checkpoint, CPU)


def features(encoder, path):
    return encoder.encode(decode_path(path).audio)["features"]


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.stem)
def test_features_equal_the_official_ones(clip, name, model, encoders, tmp_path):
    path = clip.write(tmp_path)
    expected = official_features(model, path, name)
    found = features(encoders[name], path)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("clip", [SPEECH, OTHER_SPEECH], ids=["speech", "other"])
def test_features_of_speech_equal_the_official_ones(clip, name, model, encoders):
    """Of a FLAC file, which the official package reads as well."""
    expected = official_features(model, clip.path, name)
    assert np.array_equal(features(encoders[name], clip.path), expected)


def test_what_the_official_package_keeps_for_a_prompt_equals_ours(model, encoders):
    cache = model.build_prompt_cache(
        prompt_text="What was said in it.",
        prompt_wav_path=str(SPEECH.path),
        reference_wav_path=str(SPEECH.path),
    )
    for name, kept in (("reference", "ref_audio_feat"), ("continuation", "audio_feat")):
        expected = cache[kept].numpy()
        assert np.array_equal(features(encoders[name], SPEECH.path), expected)


def test_a_clip_that_is_encoded_again_equals_the_official_one_still(model, encoders):
    """The official activation is compiled as it runs; on a CPU it stays the same."""
    for _ in range(3):
        expected = official_features(model, SPEECH.path, "reference")
        found = features(encoders["reference"], SPEECH.path)
        assert np.array_equal(found, expected)


@pytest.mark.slow
def test_features_equal_the_official_ones_with_the_released_sizes(tmp_path):
    options = CheckpointOptions(encoders="real")
    checkpoint = write_voxcpm2_checkpoint(tmp_path / "real", options)
    model = load_official(checkpoint)
    encoders = ours.load_reference_encoders(checkpoint, CPU)
    path = Clip(44_100, 45_865, 2, "PCM_24").write(tmp_path)
    for name in SIDES:
        expected = official_features(model, path, name)
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
    expected = official_features(model, path, "reference")
    assert np.array_equal(features(encoders["reference"], path), expected)
    monkeypatch.setattr(ours, "resample", wrong)
    found = features(encoders["reference"], path)
    assert found.shape == expected.shape
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize("name", SIDES)
def test_the_other_side_to_fill_up_would_be_noticed(name, model, encoders):
    (other,) = SIDES.keys() - {name}
    expected = official_features(model, SPEECH.path, name)
    found = features(encoders[other], SPEECH.path)
    assert found.shape == expected.shape
    assert np.any(found != expected, axis=(1, 2)).all()


def test_the_test_checkpoint_tells_clips_apart(encoders):
    """Otherwise the comparisons above would hold for any encoder."""
    for encoder in encoders.values():
        one, other = (features(encoder, c.path) for c in (SPEECH, OTHER_SPEECH))
        num_positions = min(len(one), len(other))
        flat = [torch.tensor(f[:num_positions]).flatten() for f in (one, other)]
        assert abs(cosine_similarity(*flat, dim=0)) < 0.3
        assert all(0.3 < f.std() < 3 for f in flat)
