"""What holds of the reference encoders of every family that has a tiny checkpoint."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import set_num_threads

from tests.audio_clips import voiced
from tests.families.cases import every_case, unlike_cases
from tests.families.conftest import load
from tests.torch_threads import on_threads
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.cosyvoice3.positions import num_resampled as num_sinc
from vllm_tts_cache.families.networks import sinc_resample
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.networks.resample import resample
from vllm_tts_cache.families.voxcpm2.positions import num_positions

# Odd, a sample more and less than whole frames, and too short for one.
AWKWARD = [(8_000, 7_919), (16_000, 2_560), (22_050, 22_051), (24_000, 5_759)]
AWKWARD += [(24_000, 5_761), (44_100, 44_099), (48_000, 1_601), (48_000, 100_003)]


def audio(rate_hz, num_samples, pitch_hz=220.0):
    seconds = num_samples / rate_hz + 0.1
    samples = voiced(rate_hz, seconds, pitch_hz=pitch_hz)[:num_samples]
    return ReferenceAudio.of(np.ascontiguousarray(samples[:, 0], np.float32), rate_hz)


CLIP = audio(24_000, 30_011)
RATES_HZ = (16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000)
on_cpu = partial(sinc_resample.resample, device=torch.device("cpu"))


def encoded(encoder, given=CLIP):
    arrays = encoder.encode(given).arrays
    return {name: array.tobytes() for name, array in arrays.items()}


def all_encoded(encoders, given=CLIP):
    return {name: encoded(encoder, given) for name, encoder in encoders.items()}


@every_case
def test_its_modes_need_encoders_loaded_under_their_own_names(case, encoders_of):
    loaded = encoders_of(case)
    assert set(loaded) == set(case.family.encoders)
    assert all(encoder.name == name for name, encoder in loaded.items())
    assert len({e.fingerprint for e in loaded.values()}) == len(loaded)


@every_case
@pytest.mark.parametrize("rate_hz, num_samples", AWKWARD)
def test_as_much_is_made_as_was_announced(case, encoders_of, rate_hz, num_samples):
    given = audio(rate_hz, num_samples)
    for name, encoder in encoders_of(case).items():
        try:
            made, like = encoder.encode(given).arrays, case.arrays[name](given)
        except EncodeError:
            assert num_samples < 2_000, "too short for some networks"
            continue
        assert made.keys() == like.keys()
        for array, expected in zip(made.values(), like.values(), strict=True):
            assert array.dtype == expected.dtype
            assert array.shape[1:] == expected.shape[1:]
            assert len(array) == len(expected) or not case.announces


# What resamples, to how many samples, in announced lengths of how many.
RESAMPLED = {
    "qwen3": (num_codec_frames, resample, 24_000, 1_920),
    "voxcpm2": (num_positions, resample, 16_000, 2_560),
    "cosyvoice3, codes": (partial(num_sinc, to_hz=16_000), on_cpu, 16_000, 1),
    "cosyvoice3, mel": (partial(num_sinc, to_hz=24_000), on_cpu, 24_000, 1),
}


@pytest.mark.parametrize("name", RESAMPLED)
@settings(max_examples=40)
@given(data=st.data())
def test_announced_lengths_follow_the_resampler_up_to_30_seconds(name, data):
    announced, resample, to_hz, length = RESAMPLED[name]
    rates_hz = st.sampled_from(RATES_HZ)  # others take a huge kernel each
    if resample is not on_cpu:
        rates_hz |= st.integers(8_000, 192_000)
    rate_hz = data.draw(rates_hz)
    num_samples = data.draw(st.integers(rate_hz, 30 * rate_hz))
    silence = ReferenceAudio.of(np.zeros(num_samples, np.float32), rate_hz)
    made = -(-len(resample(silence, to_hz)) // length)
    assert announced(num_samples, rate_hz) == made


@every_case
def test_speakers_are_told_apart_and_one_is_the_same_twice(case, encoders_of):
    for encoder in encoders_of(case).values():
        first, again, other = (
            encoder.encode(audio(24_000, 48_000, pitch_hz=pitch_hz)).arrays
            for pitch_hz in (220.0, 220.0, 330.0)
        )
        for name, array in first.items():
            assert array.tobytes() == again[name].tobytes()
        # In some of it: two speakers may be equally loud.
        assert any(not np.array_equal(first[name], other[name]) for name in first)


# What could change an encoding, and does not


@unlike_cases
def test_they_are_float32_whatever_the_default_is_then(case, tiny, encoders_of):
    checkpoint = tiny(case.family)  # else it would be written in bfloat16
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        loaded = load(case, checkpoint)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, encoder in loaded.items():
        assert encoder.fingerprint == encoders_of(case)[name].fingerprint
    assert all_encoded(loaded) == all_encoded(encoders_of(case))


@unlike_cases
def test_a_matmul_precision_that_the_engine_lowered_changes_nothing(case, encoders_of):
    before = all_encoded(encoders_of(case))
    torch.set_float32_matmul_precision("medium")
    try:
        assert all_encoded(encoders_of(case)) == before
    finally:
        torch.set_float32_matmul_precision("highest")


@every_case
def test_an_encoding_depends_on_none_before_or_beside_it(case, encoders_of):
    clips = [audio(24_000, 30_000 + 3_000 * n, 200.0 + 50 * n) for n in range(3)]
    for encoder in encoders_of(case).values():
        encode = partial(encoded, encoder)
        with on_threads(1), ThreadPoolExecutor(3, "", set_num_threads, (1,)) as pool:
            alone = [encode(clip) for clip in clips]
            beside = list(pool.map(encode, clips * 2))
        assert beside == alone * 2
        assert alone[0] != alone[1]


@unlike_cases
def test_no_random_number_is_drawn(case, tiny):
    """It would shift what an unseeded request draws."""
    before = torch.get_rng_state()
    all_encoded(load(case, tiny(case.family)))
    assert torch.equal(before, torch.get_rng_state())


@unlike_cases
def test_rewriting_a_file_changes_nothing_loaded(case, tiny, tmp_path, encoders_of):
    directory = shutil.copytree(tiny(case.family), tmp_path / "checkpoint")
    loaded = load(case, directory)
    for name in case.weights:
        with (directory / name).open("r+b") as file:
            file.write(b"\0" * (directory / name).stat().st_size)
    assert all_encoded(loaded) == all_encoded(encoders_of(case))


@unlike_cases
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no network"),
        lambda path: path.write_bytes(path.read_bytes()[:-1000]),
        lambda path: path.write_bytes(path.read_bytes()[:1000]),
    ],
    ids=["absent", "empty", "text", "cut", "head"],
)
def test_a_file_that_is_no_network_is_refused_by_its_path(case, tiny, tmp_path, spoil):
    directory = shutil.copytree(tiny(case.family), tmp_path / "checkpoint")
    for name in case.weights:
        content = (directory / name).read_bytes()
        spoil(directory / name)
        with pytest.raises(CheckpointError) as refused:
            load(case, directory)
        assert name in str(refused.value)
        (directory / name).write_bytes(content)
