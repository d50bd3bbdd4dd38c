"""The codec of Breeze-TTS-2 is Qwen3-TTS's, and gives what the host encodes."""

import json
import shutil

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.breeze_tts_2.reference_encoder import (
    BreezeReferenceEncoder,
)

from tests.families.breeze_tts_2.case import host_encoder
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.breeze_tts_2.encoders import load_reference_encoders
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.qwen3_tts.encoders import (
    load_reference_encoders as load_those_of_qwen3,
)
from vllm_tts_cache.families.qwen3_tts.family import FAMILY as QWEN3

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoder(own_checkpoint):
    return load_reference_encoders(own_checkpoint, CPU)["codec"]


@pytest.fixture(scope="module")
def hosts(own_checkpoint) -> BreezeReferenceEncoder:
    return host_encoder(own_checkpoint)


def noise(num_samples, rate_hz=24_000):
    samples = np.random.default_rng(num_samples).standard_normal(num_samples)
    return ReferenceAudio.of((0.1 * samples).astype(np.float32), rate_hz)


def test_it_has_the_encoding_of_qwen3(encoder, tiny):
    """So a clip that one of two servers has encoded is encoded for both."""
    theirs = load_those_of_qwen3(tiny(QWEN3), CPU)["codec"]
    assert encoder.fingerprint == theirs.fingerprint
    assert FAMILY.encoders[0] in QWEN3.encoders


@pytest.mark.parametrize("num_samples", [24_000, 24_001, 48_001, 82_559])
def test_codes_are_the_hosts(encoder, hosts, num_samples):
    audio = noise(num_samples)
    codes = encoder.encode(audio)["codes"]
    assert len(codes) == num_codec_frames(num_samples, 24_000)
    waveform = torch.tensor(audio.samples)
    with torch.inference_mode():
        (expected,) = hosts.encode_batch([waveform], [len(codes)])
    np.testing.assert_array_equal(codes, expected.numpy())


def test_another_codec_is_refused(own_checkpoint, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(own_checkpoint, folder)
    path = folder / "audio_tokenizer/config.json"
    config = json.loads(path.read_text()) | {"encode_downsample_rate": 960}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="960 samples at 24000 Hz"):
        load_reference_encoders(folder, CPU)
