"""Stage 1 of Fish Speech: the host's samples, from a codec that is loaded whole."""

from pathlib import Path

import pytest
import torch
from vllm_omni.model_executor.models.fish_speech import fish_speech_dac_decoder as host

from tests.real_talker import loaded
from vllm_tts_cache.families.fish_speech.codec import build_codec
from vllm_tts_cache.families.fish_speech.sizes import read_sizes

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
    """The host's class; it reads no codec.json, so it is given its sizes."""
    sizes = read_sizes(Path(decoder.vllm_config.model_config.model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "build_dac_codec", lambda: build_codec(sizes))
        model = host.FishSpeechDACDecoder(vllm_config=decoder.vllm_config)
        model._ensure_codec_loaded()
    return model


@pytest.mark.parametrize(
    "codes", [*map(codes_of, LENGTHS), codes_of(5) + 4_000], ids=[*LENGTHS, "clamped"]
)
def test_the_samples_are_the_hosts(decoder, hosts_decoder, codes):
    [ours], [hosts] = samples_of(decoder, codes), samples_of(hosts_decoder, codes)
    assert ours.dtype == hosts.dtype
    assert ours.shape == (codes.shape[1] * SAMPLES_PER_FRAME,)
    assert torch.equal(ours, hosts)
    assert ours.std() > 0.01


def test_the_samples_of_a_batch_are_the_hosts(decoder, hosts_decoder):
    batch = [codes_of(num_frames, seed) for seed, num_frames in enumerate((7, 30))]
    ours, hosts = samples_of(decoder, *batch), samples_of(hosts_decoder, *batch)
    assert all(torch.equal(*pair) for pair in zip(ours, hosts, strict=True))
    assert len(ours) == 2


def test_only_what_decoding_needs_is_kept(decoder, own_checkpoint):
    kept = {name for name, _ in decoder._codec.named_parameters()}
    encoding = ("encoder.", "quantizer.pre_module.", "quantizer.downsample.")
    assert not any(name.startswith(encoding) for name in kept)
    assert not any("parametrizations" in name for name in kept)
    num_kept = sum(parameter.numel() for parameter in decoder._codec.parameters())
    whole = torch.load(own_checkpoint / "codec.pth")["generator"]
    assert num_kept < 0.8 * sum(tensor.numel() for tensor in whole.values())


def test_the_codec_has_decoded_before_the_first_request(decoder):
    # The host notes its first decoding, to log it once.
    stage = type(decoder)(vllm_config=decoder.vllm_config)
    assert not stage._logged_codec_stats
    stage.load_weights(())
    assert stage._logged_codec_stats
