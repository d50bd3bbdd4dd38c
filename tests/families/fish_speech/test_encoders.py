"""The Fish Speech reference encoder: the host's codes, and nothing but its codec."""

import dataclasses
import io
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
import torch
from vllm_omni.model_executor.models.fish_speech import dac_encoder as host
from vllm_omni.model_executor.models.fish_speech.dac_modules.transformer import (
    precompute_freqs_cis,
)

from tests.codec_names import old_names
from tests.families.fish_speech.written import write_fish_speech_checkpoint
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.fish_speech.codec import (
    RELEASED,
    build_sized_codec,
    read_sizes,
)
from vllm_tts_cache.families.fish_speech.codec_encoder import CodecEncoder
from vllm_tts_cache.families.fish_speech.encoders import load_reference_encoders
from vllm_tts_cache.families.fish_speech.family import CODEC, FAMILY
from vllm_tts_cache.families.fish_speech.tiny.sizes import CheckpointOptions
from vllm_tts_cache.families.networks import sinc_filter, sinc_resample

CPU = torch.device("cpu")


def noisy_tone(num_samples, rate_hz, seed=0):
    rng = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * (150 + 40 * seed) * np.arange(num_samples) / rate_hz)
    samples = 0.2 * tone + 0.05 * rng.standard_normal(num_samples)
    return samples.astype(np.float32)


def audio(num_samples, rate_hz=44_100, seed=0):
    return ReferenceAudio.of(noisy_tone(num_samples, rate_hz, seed), rate_hz)


def load(directory) -> CodecEncoder:
    encoder = load_reference_encoders(directory, CPU)[CODEC]
    assert isinstance(encoder, CodecEncoder)
    return encoder


def codes_of(encoder, given):
    return encoder.encode(given)["codes"]


@pytest.fixture(scope="module")
def encoder(fish_speech_checkpoint):
    return load(fish_speech_checkpoint)


@pytest.fixture
def host_codes(fish_speech_checkpoint, monkeypatch):
    """The host's own encoder; it reads no codec.json, so it is given its sizes."""
    sizes = read_sizes(fish_speech_checkpoint)
    monkeypatch.setattr(host, "build_dac_codec", lambda: build_sized_codec(sizes))

    def encode(samples, rate_hz):
        return host.encode_reference_audio_codes(
            str(fish_speech_checkpoint), samples, rate_hz, device="cpu"
        ).numpy()

    yield encode
    host._codec_cache.clear()


class CodecFile:
    """A copy of the codec alone, to be spoiled."""

    def __init__(self, original, directory):
        self.directory = directory
        shutil.copy(original / "codec.json", directory)
        self.tensors = torch.load(original / "codec.pth")["generator"]

    def save(self, state=None):
        torch.save(
            self.tensors if state is None else state, self.directory / "codec.pth"
        )
        return self.directory


@pytest.fixture
def codec_file(fish_speech_checkpoint, tmp_path):
    return CodecFile(fish_speech_checkpoint, tmp_path)


def test_the_one_way_to_clone_needs_the_encoder_that_is_loaded(fish_speech_checkpoint):
    encoders = load_reference_encoders(fish_speech_checkpoint, CPU)
    assert [mode.encoders for mode in FAMILY.modes] == [tuple(encoders)]
    assert all(encoder.name == name for name, encoder in encoders.items())


def test_codes_are_one_row_of_10_per_2048_samples_the_semantic_one_first(encoder):
    codes = codes_of(encoder, audio(10 * 44_100))
    assert (codes.dtype, codes.shape) == (np.int16, (216, 10))
    assert codes.min() >= 0
    assert codes[:, 0].max() > 1_023
    assert codes[:, 1:].max() < 1_024


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000, 44_100, 48_000])
def test_codes_equal_the_hosts_at_every_rate_and_at_odd_lengths(
    encoder, host_codes, rate_hz
):
    samples = noisy_tone(round(1.3 * rate_hz) | 1, rate_hz)
    codes = codes_of(encoder, ReferenceAudio.of(samples, rate_hz))
    assert np.array_equal(codes, host_codes(samples, rate_hz))


@pytest.mark.parametrize("rate_hz", [24_000, 44_100])
def test_several_clips_are_encoded_each_by_itself(encoder, host_codes, rate_hz):
    """No frame of one depends on another, and each may end with half a frame."""
    lengths = (round(1.3 * rate_hz) | 1, rate_hz, round(1.1 * rate_hz))
    clips = [audio(n, rate_hz, seed) for seed, n in enumerate(lengths)]
    together = codes_of(encoder, ReferenceAudio.joined(clips))
    alone = [codes_of(encoder, clip) for clip in clips]
    assert together.tobytes() == np.concatenate(alone).tobytes()
    hosts = [host_codes(clip.samples.copy(), rate_hz) for clip in clips]
    assert np.array_equal(together, np.concatenate(hosts))
    samples = np.concatenate([clip.samples for clip in clips])
    one = codes_of(encoder, ReferenceAudio.of(samples, rate_hz))
    assert not np.array_equal(one, together)


def test_codes_equal_the_hosts_past_both_attention_windows(encoder, host_codes):
    """Of 512 frames at 86 a second, and of 128 at 21.5: both last 6 s."""
    samples = noisy_tone(10 * 24_000, 24_000)
    codes = codes_of(encoder, ReferenceAudio.of(samples, 24_000))
    assert np.array_equal(codes, host_codes(samples, 24_000))


@pytest.mark.parametrize("num_samples", [1, 2_047, 2_048, 2_049])
def test_codes_equal_the_hosts_around_a_single_frame(encoder, host_codes, num_samples):
    samples = noisy_tone(num_samples, 44_100)
    codes = codes_of(encoder, ReferenceAudio.of(samples, 44_100))
    assert np.array_equal(codes, host_codes(samples, 44_100))


def test_a_stereo_file_gives_the_codes_that_the_host_gives_to_its_channels(
    encoder, host_codes, tmp_path
):
    left, right = noisy_tone(50_001, 44_100), noisy_tone(50_001, 44_100, seed=1)
    channels = np.stack([left, right])
    path = tmp_path / "stereo.wav"
    soundfile.write(path, channels.T, 44_100, subtype="FLOAT")
    codes = codes_of(encoder, decode_path(path).audio)
    assert np.array_equal(codes, host_codes(channels, 44_100))
    assert not np.array_equal(codes, host_codes(left, 44_100))


@pytest.mark.slow
def test_codes_equal_the_hosts_with_the_released_sizes(tmp_path, monkeypatch):
    """391 million weights; the host's constructor need not draw random ones first."""
    checkpoint = write_fish_speech_checkpoint(
        tmp_path / "real", CheckpointOptions(encoders="real")
    )
    for name in ("trunc_normal_", "kaiming_uniform_", "normal_", "uniform_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    samples = noisy_tone(48_001, 48_000)
    expected = host.encode_reference_audio_codes(
        str(checkpoint), samples, 48_000, device="cpu"
    ).numpy()
    host._codec_cache.clear()
    codes = codes_of(load(checkpoint), ReferenceAudio.of(samples, 48_000))
    assert np.array_equal(codes, expected)
    assert len(np.unique(codes[:, 0])) > 10
    shutil.rmtree(checkpoint)  # 1.5 GB, which pytest would keep


def test_a_bfloat16_network_gives_other_codes(fish_speech_checkpoint, encoder):
    """So these weights can tell; the tests of identity are worth something."""
    rounded = load(fish_speech_checkpoint)
    rounded.network.bfloat16()
    waveform = torch.from_numpy(noisy_tone(44_100, 44_100))
    with torch.no_grad():
        rounded_codes = rounded._codes(waveform.bfloat16())
        exact_codes = encoder._codes(waveform)
    changed = (rounded_codes != exact_codes).float().mean(dim=1)
    assert changed[0] > 0.05
    assert changed.mean() > 0.2


def test_a_matmul_precision_that_the_engine_lowered_changes_no_code(encoder):
    before = codes_of(encoder, audio(44_100))
    torch.set_float32_matmul_precision("medium")
    try:
        assert np.array_equal(codes_of(encoder, audio(44_100)), before)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_encoder_is_float32_though_it_loads_while_the_default_is_bfloat16(
    fish_speech_checkpoint, encoder
):
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        loaded = load(fish_speech_checkpoint)
    finally:
        torch.set_default_dtype(torch.float32)
    tensors = (*loaded.network.parameters(), *loaded.network.buffers())
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert loaded.fingerprint == encoder.fingerprint
    assert np.array_equal(
        codes_of(loaded, audio(44_100)), codes_of(encoder, audio(44_100))
    )


def test_only_what_encoding_needs_is_kept(encoder, codec_file):
    kept = {name for name, _ in encoder.network.named_parameters()}
    assert not any(
        name.startswith(("decoder.", "quantizer.upsample.", "quantizer.post_module."))
        for name in kept
    )
    assert not any("weight_g" in name or "parametrizations" in name for name in kept)
    whole = sum(tensor.numel() for tensor in codec_file.tensors.values())
    assert sum(p.numel() for p in encoder.network.parameters()) < 0.8 * whole


def test_an_encoding_does_not_depend_on_what_is_encoded_before_or_beside_it(encoder):
    audios = [audio(44_100 + 4_000 * seed, seed=seed) for seed in range(4)]
    alone = [codes_of(encoder, given) for given in audios]
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(lambda given: codes_of(encoder, given), audios * 2))
    assert all(np.array_equal(b, alone[i % 4]) for i, b in enumerate(beside))
    assert not np.array_equal(alone[0], alone[1][:22])


def test_loading_draws_no_random_numbers(fish_speech_checkpoint):
    before = torch.get_rng_state()
    load(fish_speech_checkpoint)
    assert torch.equal(before, torch.get_rng_state())


def test_audio_past_the_networks_positions_is_refused_before_it_runs(encoder):
    # At a tenth of the rate: the same number of frames, without the samples.
    with pytest.raises(EncodeError, match="4097 frames"):
        encoder.encode(audio(4_096 * 2_048 // 10 + 1, rate_hz=4_410))


def test_a_rate_with_hardly_a_common_period_is_resampled_without_a_huge_kernel():
    odd = audio(44_101, rate_hz=44_101)
    assert sinc_filter.is_too_large(44_101, 44_100)
    samples = sinc_resample.resample(odd, 44_100, CPU)
    assert samples.shape == (44_100,)
    close = torch.from_numpy(noisy_tone(44_100, 44_100))
    tone = torch.fft.rfft(samples)[150].abs() / torch.fft.rfft(close)[150].abs()
    assert tone == pytest.approx(1.0, abs=0.05)


# What codec.pth may look like


def new_names(tensors):
    return {
        name.replace(".weight_g", ".parametrizations.weight.original0").replace(
            ".weight_v", ".parametrizations.weight.original1"
        ): tensor
        for name, tensor in tensors.items()
    }


def training_names(tensors):
    renamed = {f"generator.{name}": tensor for name, tensor in tensors.items()}
    return {**renamed, "discriminator.weight": torch.zeros(3)}


@pytest.mark.parametrize(
    "spelling",
    [
        dict,
        lambda t: {"generator": t},
        lambda t: {"state_dict": training_names(t)},
        training_names,
        old_names,
        new_names,
        lambda t: {"generator": old_names(t)},
    ],
    ids=["bare", "wrapped", "training", "prefixed", "old", "new", "wrapped-old"],
)
def test_every_spelling_loads_as_the_same_encoder(codec_file, encoder, spelling):
    loaded = load(codec_file.save(spelling(codec_file.tensors)))
    assert loaded.fingerprint == encoder.fingerprint
    assert np.array_equal(
        codes_of(loaded, audio(44_100)), codes_of(encoder, audio(44_100))
    )


def test_buffers_that_the_constructor_computes_may_be_in_the_file(codec_file, encoder):
    module = "quantizer.pre_module"
    codec_file.tensors[f"{module}.freqs_cis"] = precompute_freqs_cis(
        4_096, 64, 10_000, dtype=torch.float32
    )
    codec_file.tensors[f"{module}.causal_mask"] = torch.ones(8, 8).tril().bool()
    codec_file.tensors["decoder.causal_mask"] = torch.ones(8, 8).tril().bool()
    assert load(codec_file.save()).fingerprint == encoder.fingerprint


def test_other_rotary_frequencies_in_the_file_are_used_and_make_it_another_encoder(
    codec_file, encoder, host_codes, fish_speech_checkpoint, monkeypatch
):
    other = precompute_freqs_cis(4_096, 64, 500, dtype=torch.float32)
    codec_file.tensors["quantizer.pre_module.freqs_cis"] = other
    loaded = load(codec_file.save())
    assert loaded.fingerprint != encoder.fingerprint
    samples = noisy_tone(44_100, 44_100)
    codes = codes_of(loaded, ReferenceAudio.of(samples, 44_100))
    expected = host.encode_reference_audio_codes(
        str(codec_file.directory), samples, 44_100, device="cpu"
    ).numpy()
    assert np.array_equal(codes, expected)
    assert not np.array_equal(codes, codes_of(encoder, audio(44_100)))


def test_a_legacy_file_that_is_no_archive_loads(codec_file, encoder):
    torch.save(
        codec_file.tensors,
        codec_file.directory / "codec.pth",
        _use_new_zipfile_serialization=False,
    )
    assert load(codec_file.directory).fingerprint == encoder.fingerprint


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.clear(), r"\d+ tensors missing: decoder\."),
        (
            lambda t: t.pop("encoder.block.0.conv.bias"),
            r"1 tensors missing: encoder\.block\.0\.conv\.bias",
        ),
        (
            lambda t: t.pop("decoder.model.0.conv.bias"),
            r"1 tensors missing: decoder\.model\.0\.conv\.bias",
        ),
        (
            lambda t: t.update({"encoder.block.0.conv.bias": torch.zeros(3)}),
            r"another shape: encoder\.block\.0\.conv\.bias \(3,\) instead of \(8,\)",
        ),
        (
            lambda t: t.update({"quantizer.pre_module.freqs_cis": torch.zeros(8, 2)}),
            r"1 tensors of another shape: quantizer\.pre_module\.freqs_cis",
        ),
    ],
    ids=[
        "empty",
        "missing",
        "missing-in-the-decoder",
        "misshaped",
        "misshaped-frequencies",
    ],
)
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
def test_what_is_left_over_in_the_file_changes_nothing(
    codec_file, encoder, plugin_log, extra
):
    loaded = load(codec_file.save({**codec_file.tensors, **extra}))
    assert loaded.fingerprint == encoder.fingerprint
    assert np.array_equal(
        codes_of(loaded, audio(44_100)), codes_of(encoder, audio(44_100))
    )
    [name] = extra
    assert [m.endswith(f"left out: {name}") for m in plugin_log.messages] == [
        True for value in extra.values() if isinstance(value, torch.Tensor)
    ]


def test_a_small_codec_without_its_sizes_is_refused(codec_file):
    (codec_file.save() / "codec.json").unlink()
    with pytest.raises(CheckpointError, match="of another shape"):
        load(codec_file.directory)


@pytest.mark.parametrize(
    "text", ['{"encoder_dim": "8"}', '{"encoder_dim": 6}', '{"width": 8}', "8"]
)
def test_sizes_that_cannot_be_used_are_refused(codec_file, text):
    (codec_file.save() / "codec.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"codec\.json"):
        load(codec_file.directory)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not a torch file"),
        lambda path: path.write_bytes(path.read_bytes()[:100_000]),
        lambda path: path.write_bytes(path.read_bytes()[-100_000:]),
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save({"epoch": 3}, path),
        lambda path: torch.save({"generator": io.BytesIO}, path),
    ],
    ids=["absent", "empty", "text", "head", "tail", "list", "number", "object"],
)
def test_a_file_that_is_no_codec_is_refused_by_its_path(codec_file, spoil):
    path = codec_file.save() / "codec.pth"
    spoil(path)
    with pytest.raises(CheckpointError, match=r"codec\.pth"):
        load(codec_file.directory)


def test_rewriting_the_file_changes_nothing_that_is_loaded(codec_file):
    loaded = load(codec_file.save())
    before = codes_of(loaded, audio(44_100))
    path = codec_file.directory / "codec.pth"
    path.write_bytes(bytes(path.stat().st_size))
    assert np.array_equal(codes_of(loaded, audio(44_100)), before)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("encoder.block.0.conv.bias", True),
        ("quantizer.quantizer.quantizers.8.codebook.weight", True),
        ("quantizer.post_module.norm.weight", False),
        ("decoder.model.0.conv.bias", False),
    ],
)
def test_the_fingerprint_names_the_weights_that_encode(
    codec_file, encoder, name, changes
):
    codec_file.tensors[name].view(-1)[0] += 1
    assert (load(codec_file.save()).fingerprint != encoder.fingerprint) == changes


def test_the_sizes_default_to_the_released_codec_in_every_setting():
    with torch.device("meta"):
        ours, theirs = build_sized_codec(RELEASED), host.build_dac_codec()
    assert repr(ours) == repr(theirs)
    for module, other in zip(ours.modules(), theirs.modules(), strict=True):
        assert settings_of(module) == settings_of(other)
    shapes = [
        {name: tensor.shape for name, tensor in codec.state_dict().items()}
        for codec in (ours, theirs)
    ]
    assert shapes[0] == shapes[1]


def settings_of(module):
    plain = (bool, int, float, str, tuple, list, type(None))
    given = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(module).items()
        if isinstance(value, plain)
    }
    config = getattr(module, "config", None)
    return given | ({"config": dataclasses.asdict(config)} if config else {})
