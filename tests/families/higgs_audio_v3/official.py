"""The codes of transformers' tokenizer, behind the official resampler.

Boson AI's own code brings a clip to 24 kHz by ``librosa.resample``, and does nothing
else with it; its network is the one of transformers, which reads the same weights.
"""

import librosa
import torch
from safetensors.torch import load_file
from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

from tests.families.clip import Clip
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.higgs_audio_v3.encoders import CODEC_PREFIX, SIZES
from vllm_tts_cache.speaker.checkpoint_dir import read_json

# Whole hops, a sample more and less, and both sides of where the acoustic half would
# give a frame less than the semantic half.
CLIPS = (
    Clip(8_000, 8_000),
    Clip(11_025, 55_127),
    Clip(16_000, 16_001),
    Clip(22_050, 23_173),
    Clip(24_000, 24_479),
    Clip(24_000, 24_480),
    *(Clip(24_000, n) for n in (24_000, 24_001, 24_481, 24_959, 72_017, 241_001)),
    Clip(24_000, 48_001),
    Clip(44_100, 44_101),
    Clip(44_100, 231_529),
    Clip(48_000, 96_001),
    Clip(96_000, 191_999),
)


def tokenizer_of(checkpoint):
    """The tokenizer out of the checkpoint's own weights."""
    config = read_json(checkpoint / "config.json")[SIZES]
    network = HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig(**config))
    state = {
        name.removeprefix(CODEC_PREFIX): tensor.float()
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if name.startswith(CODEC_PREFIX)
    }
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert (missing, unexpected) == ([], ["semantic_model.masked_spec_embed"])
    return network.eval()


@torch.inference_mode()
def encodings(checkpoint, _folder, paths):
    network, found = tokenizer_of(checkpoint), {}
    for path in paths:
        audio = decode_path(path).audio
        at_24k = audio.samples
        if (rate_hz := audio.sample_rate_hz) != 24_000:
            at_24k = librosa.resample(at_24k, orig_sr=rate_hz, target_sr=24_000)
        waveform = torch.from_numpy(at_24k.copy()).view(1, 1, -1)
        codes = network.encode(waveform, return_dict=False)[0].T.numpy()
        found[path.stem, "codec"] = codes
    return found
