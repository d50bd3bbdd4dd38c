"""Stage 1 of Fish Speech: the host's samples, from a codec that is loaded whole."""

import copy
from pathlib import Path

import pytest
import torch
from vllm_omni.model_executor.models.fish_speech import fish_speech_dac_decoder as host
from vllm_omni.model_executor.models.fish_speech.dac_modules.transformer import (
    precompute_freqs_cis,
)

from tests.families.fish_speech.test_encoders import CodecFile
from tests.real_talker import loaded
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.fish_speech.codec import build_codec, read_sizes

NUM_CODEBOOKS, SAMPLES_PER_FRAME = 10, 2_048
# Below, at and past the attention window of 128 frames.
LENGTHS = (1, 4, 25, 128, 140)


def codes_of(num_frames, seed=0):
    """``(10, num_frames)``, the semantic codebook first."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1_024, (NUM_CODEBOOKS, num_frames), generator=generator)
    codes[0] = torch.randint(4_096, (num_frames,), generator=generator)
    return codes


def samples_of(model, *requests, **kwargs):
    ids = torch.cat([codes.reshape(-1) for codes in requests])
    counts = [codes.numel() for codes in requests]
    given = model(ids, seq_token_counts=counts, **kwargs)
    return given.multimodal_outputs["model_outputs"]


@pytest.fixture(scope="module")
def decoder(own_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("stage-1")
    stage = {
        "model_stage": "dac_decoder",
        "model_arch": "FishSpeechDACDecoder",
        "worker_type": "generation",
    }
    with loaded(own_checkpoint, directory, **stage) as model:
        yield model


@pytest.fixture(scope="module")
def hosts_decoder(decoder):
    return loaded_by_the_host(decoder.vllm_config)


def loaded_by_the_host(vllm_config):
    """The host's class; it reads no codec.json, so it is given its sizes."""
    sizes = read_sizes(Path(vllm_config.model_config.model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "build_dac_codec", lambda: build_codec(sizes))
        model = host.FishSpeechDACDecoder(vllm_config=vllm_config)
        model._ensure_codec_loaded()
    return model


@pytest.fixture
def codec_file(own_checkpoint, tmp_path):
    return CodecFile(own_checkpoint, tmp_path)


def loaded_from(codec_file, decoder):
    """What loading the model makes of the file, in a checkpoint of its own."""
    config = copy.copy(decoder.vllm_config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.model = str(codec_file.save())
    stage = type(decoder)(vllm_config=config)
    stage.load_weights(())
    return stage


def test_the_registered_model_is_ours_and_has_its_codec_before_the_first_request(
    decoder,
):
    from vllm_tts_cache.families.fish_speech.codec_worker import (
        CachedFishSpeechDACDecoder,
    )

    assert type(decoder) is CachedFishSpeechDACDecoder
    codec = decoder._codec
    decoder._ensure_codec_loaded()
    assert decoder._codec is codec


@pytest.mark.parametrize("num_frames", LENGTHS)
def test_the_samples_are_the_hosts(decoder, hosts_decoder, num_frames):
    codes = codes_of(num_frames)
    [ours], [hosts] = samples_of(decoder, codes), samples_of(hosts_decoder, codes)
    assert ours.dtype == hosts.dtype
    assert ours.shape == (num_frames * SAMPLES_PER_FRAME,)
    assert torch.equal(ours, hosts)
    assert ours.std() > 0.01


def test_the_samples_of_a_batch_are_the_hosts(decoder, hosts_decoder):
    batch = [codes_of(num_frames, seed) for seed, num_frames in enumerate((7, 30))]
    ours, hosts = samples_of(decoder, *batch), samples_of(hosts_decoder, *batch)
    assert all(torch.equal(*pair) for pair in zip(ours, hosts, strict=True))
    assert len(ours) == 2


def test_codes_out_of_range_are_clamped_as_the_host_does(decoder, hosts_decoder):
    codes = codes_of(5) + 4_000
    [ours], [hosts] = samples_of(decoder, codes), samples_of(hosts_decoder, codes)
    assert torch.equal(ours, hosts)


def test_only_what_decoding_needs_is_kept(decoder, codec_file):
    kept = {name for name, _ in decoder._codec.named_parameters()}
    encoding = ("encoder.", "quantizer.pre_module.", "quantizer.downsample.")
    assert not any(name.startswith(encoding) for name in kept)
    assert not any("parametrizations" in name for name in kept)
    num_kept = sum(parameter.numel() for parameter in decoder._codec.parameters())
    assert num_kept < 0.8 * sum(t.numel() for t in codec_file.tensors.values())


def test_rotary_frequencies_in_the_file_are_used_as_the_host_uses_them(
    decoder, codec_file
):
    other = precompute_freqs_cis(4_096, 64, 500, dtype=torch.float32)
    codec_file.tensors["quantizer.post_module.freqs_cis"] = other
    stage = loaded_from(codec_file, decoder)
    hosts = loaded_by_the_host(stage.vllm_config)
    models = (stage, hosts, decoder)
    [ours], [expected], [without] = (samples_of(m, codes_of(10)) for m in models)
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, without)


def test_a_file_that_is_not_the_whole_codec_is_refused_while_the_model_loads(
    decoder, codec_file
):
    """The same reader is tested with the encoder, on all that can be wrong."""
    codec_file.tensors.pop("decoder.model.0.conv.bias")
    missing = r"1 tensors missing: decoder\.model\.0\.conv\.bias"
    with pytest.raises(CheckpointError, match=missing):
        loaded_from(codec_file, decoder)


def test_tensors_that_are_left_over_are_one_warning(decoder, codec_file, plugin_log):
    for number in range(10):
        codec_file.tensors[f"decoder.extra.{number}"] = torch.zeros(1)
    [loaded] = samples_of(loaded_from(codec_file, decoder), codes_of(10))
    [expected] = samples_of(decoder, codes_of(10))
    assert torch.equal(loaded, expected)
    [warning] = (r.message for r in plugin_log.records if r.levelname == "WARNING")
    assert "10 tensors unexpected and left out: decoder.extra.0, " in warning
    assert warning.endswith("decoder.extra.7 and 2 more")


def test_the_codec_has_decoded_before_the_first_request(decoder):
    # The host notes its first decoding, to log it once.
    stage = type(decoder)(vllm_config=decoder.vllm_config)
    assert not stage._logged_codec_stats
    stage.load_weights(())
    assert stage._logged_codec_stats


def test_a_model_that_loads_no_weights_still_takes_the_whole_codec(decoder):
    """``load_format: dummy`` skips ``load_weights``."""
    stage = type(decoder)(vllm_config=decoder.vllm_config)
    [late], [expected] = (samples_of(m, codes_of(5)) for m in (stage, decoder))
    assert torch.equal(late, expected)
