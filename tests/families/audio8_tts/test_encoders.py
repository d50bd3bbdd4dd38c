"""The codec's encode half, out of its file, is the host's."""

import json

import numpy as np
import pytest
import torch
from torch.nn.utils.parametrize import is_parametrized
from vllm_omni.model_executor.models.audio8_tts import codec_utils
from vllm_omni.model_executor.models.audio8_tts.codec import build_arktts_codec

from benchmarks.gpu_check.other_device import another_device
from tests.families.clip import noisy_tone
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.audio8_tts.encoders import load_reference_encoders

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory):
    """Random weights in the one size that there is."""
    folder = tmp_path_factory.mktemp("audio8") / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "arktts"}')
    with torch.random.fork_rng():
        torch.manual_seed(0)
        codec = build_arktts_codec()
    assert any(is_parametrized(module) for module in codec.modules())
    torch.save({"state_dict": codec.state_dict()}, folder / "codec.pth")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("rate_hz", "num_samples"), [(44_100, 44_100), (44_100, 50_001), (24_000, 30_000)]
)
def test_codes_are_the_hosts(whole_checkpoint, monkeypatch, rate_hz, num_samples):
    monkeypatch.setattr(codec_utils, "_codec_cache", {})
    audio = noisy_tone(num_samples, rate_hz)
    encoder = load_reference_encoders(whole_checkpoint, CPU)["codec"]
    codes = encoder.encode(audio)["codes"]
    expected = codec_utils.encode_reference_audio_codes(
        str(whole_checkpoint), audio.samples.copy(), rate_hz, device=CPU
    )
    assert codes.dtype == np.int16
    np.testing.assert_array_equal(codes, expected.numpy())
    again = encoder.encode(audio)["codes"]
    np.testing.assert_array_equal(codes, again)


@pytest.mark.long
def test_the_decode_half_may_differ_in_size_and_is_compared(whole_checkpoint, tmp_path):
    config = {"model_type": "arktts", "codec_post_n_layer": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "codec.pth").symlink_to(whole_checkpoint / "codec.pth")
    # A layer too many is one warning; one too few is no codec.
    other = load_reference_encoders(tmp_path, CPU)["codec"]
    whole = load_reference_encoders(whole_checkpoint, CPU)["codec"]
    assert other.fingerprint == whole.fingerprint
    config["codec_post_n_layer"] = 9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="post_module"):
        load_reference_encoders(tmp_path, CPU)


@pytest.mark.parametrize("size", [None, 0, -1, "8", True])
def test_a_file_of_something_else_and_sizes_that_are_none_are_refused(tmp_path, size):
    sizes = {} if size is None else {"codec_post_n_head": size}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "arktts"} | sizes))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "codec.pth")
    says = "positive integers" if sizes else "missing"
    with pytest.raises(CheckpointError, match=says):
        load_reference_encoders(tmp_path, CPU)


@pytest.mark.long
def test_it_encodes_where_it_was_loaded_to(whole_checkpoint):
    clip = noisy_tone(20_000, 24_000)
    expected = load_reference_encoders(whole_checkpoint, CPU)["codec"].encode(clip)
    with another_device() as device:
        made = load_reference_encoders(whole_checkpoint, device)["codec"].encode(clip)
    np.testing.assert_array_equal(made["codes"], expected["codes"])
