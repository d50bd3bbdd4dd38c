"""The Fish Speech reference encoder: the host's codes, and nothing but its codec."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.fish_speech import dac_encoder as host
from vllm_omni.model_executor.models.fish_speech.dac_modules.transformer import (
    precompute_freqs_cis,
)

from tests.families.clip import noisy_tone
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.fish_speech.codec import build_codec
from vllm_tts_cache.families.fish_speech.encoders import load_reference_encoders
from vllm_tts_cache.families.fish_speech.family import CODEC, FAMILY
from vllm_tts_cache.families.fish_speech.sizes import read_sizes
from vllm_tts_cache.families.networks.dac.encoder import DACEncoder
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

CPU = torch.device("cpu")
audio = partial(noisy_tone, rate_hz=44_100)


def load(directory) -> DACEncoder:
    encoder = load_reference_encoders(directory, CPU)[CODEC]
    assert isinstance(encoder, DACEncoder)
    return encoder


def codes_of(encoder, given):
    return encoder.encode(given)["codes"]


@pytest.fixture(scope="module")
def encoder(own_checkpoint):
    return load(own_checkpoint)


@pytest.fixture
def host_codes(own_checkpoint, monkeypatch):
    """The host's own encoder; it reads no codec.json, so it is given its sizes."""
    sizes = read_sizes(own_checkpoint)
    monkeypatch.setattr(host, "build_dac_codec", lambda: build_codec(sizes))

    def encode(samples, rate_hz):
        return host.encode_reference_audio_codes(
            str(own_checkpoint), samples, rate_hz, device="cpu"
        ).numpy()

    yield encode
    host._codec_cache.clear()


class CodecFile:
    """A copy of the codec without the rest of the checkpoint, to be spoiled."""

    def __init__(self, original, directory):
        self.directory = directory
        for name in ("codec.json", "config.json"):
            shutil.copy(original / name, directory)
        self.tensors = torch.load(original / "codec.pth")["generator"]

    def save(self, state=None):
        state = self.tensors if state is None else state
        torch.save(state, self.directory / "codec.pth")
        return self.directory


@pytest.fixture
def codec_file(own_checkpoint, tmp_path):
    return CodecFile(own_checkpoint, tmp_path)


@pytest.mark.parametrize("rate_hz", [24_000, 44_100])
def test_several_clips_are_encoded_each_by_itself(encoder, host_codes, rate_hz):
    """No frame of one depends on another, and each may end with half a frame."""
    lengths = (round(1.3 * rate_hz) | 1, rate_hz, round(1.1 * rate_hz))
    clips = [audio(n, rate_hz=rate_hz, seed=seed) for seed, n in enumerate(lengths)]
    together = codes_of(encoder, ReferenceAudio.joined(clips))
    alone = [codes_of(encoder, clip) for clip in clips]
    assert together.tobytes() == np.concatenate(alone).tobytes()
    hosts = [host_codes(clip.samples.copy(), rate_hz) for clip in clips]
    assert np.array_equal(together, np.concatenate(hosts))
    samples = np.concatenate([clip.samples for clip in clips])
    one = codes_of(encoder, ReferenceAudio.of(samples, rate_hz))
    assert not np.array_equal(one, together)


@pytest.mark.parametrize("num_samples", [1, 2_047, 2_048, 2_049])
def test_codes_equal_the_hosts_around_a_single_frame(encoder, host_codes, num_samples):
    clip = audio(num_samples)
    codes = codes_of(encoder, clip)
    assert np.array_equal(codes, host_codes(clip.samples.copy(), 44_100))


@pytest.mark.long
def test_codes_equal_the_hosts_with_the_released_sizes(tmp_path, monkeypatch):
    """391 million weights; the host's constructor need not draw random ones first."""
    checkpoint = TinyCheckpoint(FAMILY, encoders="real").write(tmp_path / "real")
    for name in ("trunc_normal_", "kaiming_uniform_", "normal_", "uniform_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    clip = audio(48_001, rate_hz=48_000)
    expected = host.encode_reference_audio_codes(
        str(checkpoint), clip.samples.copy(), 48_000, device="cpu"
    ).numpy()
    host._codec_cache.clear()
    codes = codes_of(load(checkpoint), clip)
    assert np.array_equal(codes, expected)
    assert len(np.unique(codes[:, 0])) > 10
    shutil.rmtree(checkpoint)  # 1.5 GB, which pytest would keep


def test_only_what_encoding_needs_is_kept(encoder, codec_file):
    kept = {name for name, _ in encoder.network.named_parameters()}
    assert not any(
        name.startswith(("decoder.", "quantizer.upsample.", "quantizer.post_module."))
        for name in kept
    )
    assert not any("weight_g" in name or "parametrizations" in name for name in kept)
    whole = sum(tensor.numel() for tensor in codec_file.tensors.values())
    assert sum(p.numel() for p in encoder.network.parameters()) < 0.8 * whole


def test_audio_past_the_networks_positions_is_refused_before_it_runs(encoder):
    # At a tenth of the rate: the same number of frames, without the samples.
    with pytest.raises(EncodeError, match="4097 frames"):
        encoder.encode(audio(4_096 * 2_048 // 10 + 1, rate_hz=4_410))


WEIGHT_NORMS = (
    (".weight_g", ".parametrizations.weight.original0"),
    (".weight_v", ".parametrizations.weight.original1"),
)


def renamed(tensors, names):
    """With the ends of names replaced."""
    for found, wanted in names:
        tensors = {name.replace(found, wanted): t for name, t in tensors.items()}
    return tensors


def new_names(tensors):
    return renamed(tensors, WEIGHT_NORMS)


def old_names(tensors):
    return renamed(tensors, [(new, old) for old, new in WEIGHT_NORMS])


def training_names(tensors):
    named = {f"generator.{name}": tensor for name, tensor in tensors.items()}
    return {**named, "discriminator.weight": torch.zeros(3)}


def with_buffers(tensors):
    """Which the constructor computes."""
    freqs = precompute_freqs_cis(4_096, 64, 10_000, dtype=torch.float32)
    mask = torch.ones(8, 8).tril().bool()
    return {
        **tensors,
        "quantizer.pre_module.freqs_cis": freqs,
        "quantizer.pre_module.causal_mask": mask,
        "decoder.causal_mask": mask,
    }


SPELLINGS = {
    "bare": dict,
    "wrapped": lambda t: {"generator": t},
    "training": lambda t: {"state_dict": training_names(t)},
    "prefixed": training_names,
    "old": old_names,
    "new": new_names,
    "wrapped-old": lambda t: {"generator": old_names(t)},
    "with-buffers": with_buffers,
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_loads_as_the_same_encoder(codec_file, encoder, spelling):
    directory, state = codec_file.directory, spelling(codec_file.tensors)
    for is_archive in (True, False):  # the latter is an older form
        path = directory / "codec.pth"
        torch.save(state, path, _use_new_zipfile_serialization=is_archive)
        loaded = load(directory)
        assert loaded.fingerprint == encoder.fingerprint
    given = audio(44_100)
    assert np.array_equal(codes_of(loaded, given), codes_of(encoder, given))


def test_other_rotary_frequencies_in_the_file_are_used_and_make_it_another_encoder(
    codec_file, encoder, host_codes, own_checkpoint, monkeypatch
):
    other = precompute_freqs_cis(4_096, 64, 500, dtype=torch.float32)
    codec_file.tensors["quantizer.pre_module.freqs_cis"] = other
    loaded = load(codec_file.save())
    assert loaded.fingerprint != encoder.fingerprint
    clip = audio(44_100)
    codes = codes_of(loaded, clip)
    expected = host.encode_reference_audio_codes(
        str(codec_file.directory), clip.samples.copy(), 44_100, device="cpu"
    ).numpy()
    assert np.array_equal(codes, expected)
    assert not np.array_equal(codes, codes_of(encoder, audio(44_100)))


WRONG = {
    r"\d+ tensors missing: decoder\.": lambda t: t.clear(),
    r"1 tensors missing: decoder\.model\.0\.conv\.bias": lambda t: t.pop(
        "decoder.model.0.conv.bias"
    ),
    r"1 tensors of another shape: quantizer\.pre_module\.freqs_cis": (
        lambda t: t.update({"quantizer.pre_module.freqs_cis": torch.zeros(8, 2)})
    ),
}


@pytest.mark.parametrize(("message", "edit"), WRONG.items(), ids=range(len(WRONG)))
def test_a_wrong_set_of_tensors_is_refused_by_name(codec_file, edit, message):
    edit(codec_file.tensors)
    for spelling in (codec_file.tensors, {"generator": codec_file.tensors}):
        with pytest.raises(CheckpointError, match=message):
            load(codec_file.save(spelling))


@pytest.mark.parametrize(
    "extra",
    [
        {"encoder.block.9.bias": torch.zeros(1)},
        {"quantizer.semantic_predictor_module.weight": torch.zeros(2, 2)},
        {"encoder.block.0.conv.weight_g": torch.zeros(8, 1, 1)},
        {"step": 1_000},
    ],
    ids=["unknown", "training-only", "second-spelling", "no-tensor"],
)
def test_what_is_left_in_it_changes_nothing(codec_file, encoder, plugin_log, extra):
    loaded = load(codec_file.save({**codec_file.tensors, **extra}))
    assert loaded.fingerprint == encoder.fingerprint
    given = audio(44_100)
    assert np.array_equal(codes_of(loaded, given), codes_of(encoder, given))
    [name] = extra
    assert [m.endswith(f"left out: {name}") for m in plugin_log.messages] == [
        True for value in extra.values() if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize(
    "text", ['{"encoder_dim": "8"}', '{"encoder_dim": 6}', '{"width": 8}', "8"]
)
def test_sizes_that_cannot_be_used_are_refused(codec_file, text):
    (codec_file.save() / "codec.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"codec\.json"):
        load(codec_file.directory)
