"""Our codes are those of transformers' tokenizer, behind the official resampler.

Boson AI's own code brings a clip to 24 kHz by ``librosa.resample``, and does nothing
else with it; its network is the one of transformers, which reads the same weights.
"""

import librosa
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

from tests.audio_clips import voiced
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.higgs_audio_v3.encoders import (
    CODEC_PREFIX,
    SIZES,
    load_reference_encoders,
)
from vllm_tts_cache.speaker.checkpoint_files import read_json
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

CPU = torch.device("cpu")
CLIPS = (
    (8_000, 8_000),
    (11_025, 55_127),
    (16_000, 16_001),
    (22_050, 23_173),
    (24_000, 24_479),
    (24_000, 24_480),
    (24_000, 48_001),
    (44_100, 44_101),
    (44_100, 231_529),
    (48_000, 96_001),
    (96_000, 191_999),
)


@pytest.fixture(scope="module")
def official(higgs_audio_v3_checkpoint):
    """The tokenizer out of the checkpoint's own weights."""
    config = read_json(higgs_audio_v3_checkpoint / "config.json")[SIZES]
    network = HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig(**config))
    weights = load_file(higgs_audio_v3_checkpoint / "model.safetensors")
    state = {
        name.removeprefix(CODEC_PREFIX): tensor.float()
        for name, tensor in weights.items()
        if name.startswith(CODEC_PREFIX)
    }
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert (missing, unexpected) == ([], ["semantic_model.masked_spec_embed"])
    network.eval()

    def encode(samples, rate_hz):
        at_24k = samples
        if rate_hz != 24_000:
            at_24k = librosa.resample(samples, orig_sr=rate_hz, target_sr=24_000)
        with torch.inference_mode():
            waveform = torch.from_numpy(at_24k.copy()).view(1, 1, -1)
            return network.encode(waveform, return_dict=False)[0].T.numpy()

    return encode


@pytest.fixture(scope="module")
def encoder(higgs_audio_v3_checkpoint):
    return load_reference_encoders(higgs_audio_v3_checkpoint, CPU)["codec"]


@pytest.mark.parametrize(("rate_hz", "num_samples"), CLIPS)
def test_codes_are_the_official_ones(rate_hz, num_samples, official, encoder):
    made = voiced(rate_hz, num_samples / rate_hz + 0.1)[:num_samples, 0]
    samples = np.ascontiguousarray(made, np.float32)
    codes = encoder.encode(ReferenceAudio.of(samples, rate_hz))["codes"]
    np.testing.assert_array_equal(codes, official(samples, rate_hz))


@pytest.mark.parametrize(
    "clip", [SPEECH, OTHER_SPEECH], ids=lambda clip: clip.path.stem
)
def test_codes_of_speech_are_the_official_ones(clip, official, encoder):
    audio = decode_path(clip.path).audio
    codes = encoder.encode(audio)["codes"]
    np.testing.assert_array_equal(codes, official(audio.samples, audio.sample_rate_hz))
    assert all(len(np.unique(book)) > 20 for book in codes.T)
