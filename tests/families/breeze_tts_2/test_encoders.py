"""The codec of Breeze-TTS-2 is Qwen3-TTS's, and gives what the host encodes."""

import json
import shutil

import numpy as np
import pytest
import torch

from tests.families.breeze_tts_2.case import host_encoder
from tests.families.cases import case_of
from tests.families.clip import noisy_tone
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.breeze_tts_2.encoders import load_reference_encoders
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.qwen3_tts.family import FAMILY as QWEN3


def test_it_has_the_encoding_of_qwen3(encoders, encoders_of):
    """So a clip that one of two servers has encoded is encoded for both."""
    theirs = encoders_of(case_of(QWEN3))["codec"]
    assert encoders["codec"].fingerprint == theirs.fingerprint
    assert FAMILY.encoders[0] in QWEN3.encoders


@pytest.mark.parametrize("num_samples", [24_000, 24_001, 48_001, 82_559])
def test_codes_are_the_hosts(encoders, own_checkpoint, num_samples):
    audio = noisy_tone(num_samples, 24_000)
    codes = encoders["codec"].encode(audio)["codes"]
    assert len(codes) == num_codec_frames(num_samples, 24_000)
    waveform = torch.tensor(audio.samples)
    with torch.inference_mode():
        (expected,) = host_encoder(own_checkpoint).encode_batch(
            [waveform], [len(codes)]
        )
    np.testing.assert_array_equal(codes, expected.numpy())


def test_another_codec_is_refused(own_checkpoint, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(own_checkpoint, folder)
    path = folder / "audio_tokenizer/config.json"
    config = json.loads(path.read_text()) | {"encode_downsample_rate": 960}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="it has 24000 Hz and 960 samples"):
        load_reference_encoders(folder, torch.device("cpu"))
