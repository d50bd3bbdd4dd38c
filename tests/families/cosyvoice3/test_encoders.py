"""CosyVoice3's reference encoders, and nothing but what they read of a checkpoint."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import load, save

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.cosyvoice3 import features
from vllm_tts_cache.families.cosyvoice3.encoders import load_reference_encoders
from vllm_tts_cache.families.cosyvoice3.family import FAMILY
from vllm_tts_cache.families.cosyvoice3.positions import (
    num_mel_frames,
    num_resampled,
    num_tokens,
    num_used_tokens,
    used_tokens,
)
from vllm_tts_cache.families.networks import onnx
from vllm_tts_cache.families.networks.sinc_resample import resample

CPU = torch.device("cpu")
FILES = ("speech_tokenizer_v3.onnx", "campplus.onnx")


def noisy_tone(num_samples, rate_hz, seed=0):
    rng = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * (150 + 40 * seed) * np.arange(num_samples) / rate_hz)
    samples = 0.2 * tone + 0.05 * rng.standard_normal(num_samples)
    return samples.astype(np.float32)


def audio(num_samples, rate_hz=16_000, seed=0):
    return ReferenceAudio.of(noisy_tone(num_samples, rate_hz, seed), rate_hz)


def fingerprints(directory):
    loaded = load_reference_encoders(directory, CPU)
    return {name: encoder.fingerprint for name, encoder in loaded.items()}


@pytest.fixture(scope="module")
def encoders(cosyvoice3_checkpoint):
    return load_reference_encoders(cosyvoice3_checkpoint, CPU)


@pytest.fixture
def copy(cosyvoice3_checkpoint, tmp_path):
    for name in FILES:
        shutil.copy(cosyvoice3_checkpoint / name, tmp_path)
    return tmp_path


# What they give


def test_each_gives_one_array_of_its_own_name(encoders):
    given_audio = audio(10 * 16_000)
    found = {name: e.encode(given_audio) for name, e in encoders.items()}
    assert {name: tuple(each.arrays) for name, each in found.items()} == {
        name: (name,) for name in FAMILY.encoders
    }
    codes, mel, vector = (found[name][name] for name in FAMILY.encoders)
    assert (codes.dtype, codes.shape) == (np.int16, (250,))
    assert (mel.dtype, mel.shape) == (np.float32, (500, 80))
    assert (vector.dtype, vector.shape) == (np.float32, (192,))
    assert codes.min() >= 0 and codes.max() < 6_561
    assert all(e[n].flags.c_contiguous for n, e in found.items())


def test_30_seconds_are_half_a_megabyte(encoders):
    sizes = {n: e.encode(audio(480_000)).num_bytes for n, e in encoders.items()}
    assert sizes == {"speech_tokens": 1_500, "mel": 480_000, "speaker": 768}


def test_a_clip_of_more_than_30_seconds_is_refused(encoders):
    """The released tokenizer would make something else of it."""
    for encoder in encoders.values():
        with pytest.raises(EncodeError, match="30 s at most"):
            encoder.encode(audio(480_001))


def test_the_same_in_every_thread_and_several_at_once(encoders):
    clips = [audio(16_000 + 97 * n, seed=n) for n in range(4)]

    def encode_all(clip):
        return {n: e.encode(clip)[n].tobytes() for n, e in encoders.items()}

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = [encode_all(clip) for clip in clips]
        with ThreadPoolExecutor(
            4, initializer=torch.set_num_threads, initargs=(1,)
        ) as p:
            assert list(p.map(encode_all, clips)) == expected
    finally:
        torch.set_num_threads(before)


def threads():
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.mark.parametrize("policy", [os.SCHED_OTHER, os.SCHED_IDLE])
def test_no_thread_is_started_so_the_encode_threads_manners_hold(
    cosyvoice3_checkpoint, policy
):
    """A pool of the runtime's own would compute beside decoding, and not give way."""
    started = []
    own = set()

    def work():
        own.add(str(threading.get_native_id()))
        os.sched_setscheduler(threading.get_native_id(), policy, os.sched_param(0))
        torch.set_num_threads(1)
        loaded = load_reference_encoders(cosyvoice3_checkpoint, CPU)
        before = threads()
        for encoder in loaded.values():
            encoder.encode(audio(32_000))
        started.extend(threads() - before)

    before = threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert started == []
    # The system may still list a thread that Python has joined.
    assert threads() - own <= before


# How much


@pytest.mark.parametrize(
    ("rate_hz", "num_samples"),
    [(16_000, n) for n in (16_000, 16_001, 16_159, 16_160, 16_639, 16_640, 479_999)]
    + [(22_050, 22_051), (24_000, 24_479), (24_000, 24_480), (44_100, 44_101)]
    + [(44_101, 44_101), (48_000, 100_003), (96_000, 96_001)],
)
def test_as_much_is_made_as_is_announced(encoders, rate_hz, num_samples):
    clip = audio(num_samples, rate_hz)
    codes = encoders["speech_tokens"].encode(clip)["speech_tokens"]
    mel = encoders["mel"].encode(clip)["mel"]
    assert len(codes) == num_tokens(num_samples, rate_hz)
    assert len(mel) == num_mel_frames(num_samples, rate_hz)
    announced = num_used_tokens(num_samples, rate_hz)
    assert announced == used_tokens(len(codes), len(mel))


@given(st.data(), st.sampled_from([16_000, 22_050, 24_000, 32_000, 44_100, 48_000]))
@settings(max_examples=30, deadline=None)
def test_lengths_follow_the_resampler_up_to_30_seconds(data, rate_hz):
    num_samples = data.draw(st.integers(rate_hz, 30 * rate_hz))
    silence = ReferenceAudio.of(np.zeros(num_samples, np.float32), rate_hz)
    for to_hz in (16_000, 24_000):
        made = len(resample(silence, to_hz, CPU))
        assert made == num_resampled(num_samples, rate_hz, to_hz)


# What they are made of


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_in_the_fingerprint_of_its_own_encoder_only(copy, name):
    before = fingerprints(copy)
    content = (copy / name).read_bytes()
    # ONNX files take unknown fields: this one means nothing to the network.
    (copy / name).write_bytes(content + b"\xfa\x3f\x01x")
    try:
        after = fingerprints(copy)
    except CheckpointError:
        pytest.skip("this runtime takes no unknown fields")
    changed = {encoder for encoder in before if before[encoder] != after[encoder]}
    assert changed == {"speech_tokens" if "tokenizer" in name else "speaker"}


@pytest.mark.parametrize("constant", ["VERSION", "NUM_THREADS"])
def test_the_runtime_is_in_the_fingerprint_of_what_it_computes(
    cosyvoice3_checkpoint, monkeypatch, constant
):
    before = fingerprints(cosyvoice3_checkpoint)
    other = {"VERSION": "1.0.0", "NUM_THREADS": 2}[constant]
    monkeypatch.setattr(onnx, constant, other)
    after = fingerprints(cosyvoice3_checkpoint)
    assert {n for n in before if before[n] != after[n]} == {"speech_tokens", "speaker"}


@pytest.mark.parametrize(("name", "num_inputs"), zip(FILES, (2, 1), strict=True))
def test_the_runtime_keeps_nothing_of_the_clips_that_it_has_seen(
    cosyvoice3_checkpoint, name, num_inputs
):
    network = onnx.load_onnx(cosyvoice3_checkpoint / name, num_inputs=num_inputs)
    options = network.session.get_session_options()
    assert not options.enable_cpu_mem_arena
    assert not options.enable_mem_pattern


def test_the_runtime_is_the_one_that_is_installed():
    assert onnxruntime.__version__ == onnx.VERSION
    assert onnx.PROVIDER == "CPUExecutionProvider"
    settings_ = onnx.runtime_settings()
    assert settings_ == {
        "onnxruntime": onnxruntime.__version__,
        "provider": "CPUExecutionProvider",
        "num_threads": 1,
        "optimization": "all",
    }


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(b"no network"), "not an ONNX file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "not an ONNX file"),
    ],
    ids=["missing", "empty", "other", "cut"],
)
def test_a_file_that_is_no_network_is_named(copy, name, spoil, says):
    spoil(copy / name)
    with pytest.raises(CheckpointError, match=says) as raised:
        load_reference_encoders(copy, CPU)
    assert name in str(raised.value)


@pytest.mark.parametrize("name", FILES)
def test_weights_beside_a_file_are_refused(copy, name):
    """No fingerprint would know of a change in them."""
    save(
        load(copy / name),
        copy / name,
        save_as_external_data=True,
        location="weights.bin",
    )
    assert (copy / "weights.bin").stat().st_size > 0
    with pytest.raises(CheckpointError, match=f"{name}: .*another file"):
        load_reference_encoders(copy, CPU)


def test_a_network_of_other_inputs_is_refused(copy):
    shutil.copy(copy / "campplus.onnx", copy / "speech_tokenizer_v3.onnx")
    with pytest.raises(CheckpointError, match="1 inputs"):
        load_reference_encoders(copy, CPU)


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        (np.array([[5, 6_561]], np.int32), "no codes"),
        (np.array([[-1, 7]], np.int32), "no codes"),
        (np.zeros((1, 0), np.int32), "no codes"),
    ],
)
def test_what_is_no_code_is_an_error_of_the_clip(
    cosyvoice3_checkpoint, monkeypatch, spoiled, says
):
    monkeypatch.setattr(onnx.OnnxNetwork, "__call__", lambda *_: spoiled)
    encoder = load_reference_encoders(cosyvoice3_checkpoint, CPU)["speech_tokens"]
    with pytest.raises(EncodeError, match=says):
        encoder.encode(audio(16_000))


@pytest.mark.parametrize("spoiled", [np.zeros((1, 512)), np.full((1, 192), np.nan)])
def test_what_is_no_vector_is_an_error_of_the_clip(
    cosyvoice3_checkpoint, monkeypatch, spoiled
):
    monkeypatch.setattr(onnx.OnnxNetwork, "__call__", lambda *_: spoiled)
    encoder = load_reference_encoders(cosyvoice3_checkpoint, CPU)["speaker"]
    with pytest.raises(EncodeError, match="not a vector"):
        encoder.encode(audio(16_000))


def test_no_network_is_downloaded_and_no_other_is_opened(
    cosyvoice3_checkpoint, monkeypatch
):
    """The host fetches another tokenizer, of a gigabyte, at its first request."""
    import huggingface_hub

    def refuse(*_, **__):
        raise AssertionError("it fetches something")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setitem(__import__("sys").modules, "s3tokenizer", None)
    loaded = load_reference_encoders(cosyvoice3_checkpoint, CPU)
    for encoder in loaded.values():
        encoder.encode(audio(16_000))


def test_features_are_as_long_as_the_networks_take_them():
    clip = audio(16_000)
    assert features.tokenizer_frames(clip).shape == (1, 128, 100)
    assert features.speaker_frames(clip).shape == (1, 98, 80)
    assert features.mel_frames(clip).shape == (50, 80)
