"""The codes of the host's encoder: the official package's, with more windows."""

import pytest
import soundfile
from vllm_omni.model_executor.models.fish_speech import dac_encoder as host

from tests.families.clip import Clip
from vllm_tts_cache.families.fish_speech.codec import build_codec
from vllm_tts_cache.families.fish_speech.sizes import read_sizes

CLIPS = (
    Clip(8_000, 10_401),
    Clip(16_000, 20_801),
    Clip(24_000, 31_201),
    # Past both attention windows, of 512 frames at 86 a second, and of 128 at 21.5.
    Clip(24_000, 240_000),
    Clip(44_100, 57_331, 1, "FLOAT"),
    Clip(44_100, 50_001, 2, "FLOAT"),
    Clip(48_000, 62_401),
)


def encodings(checkpoint, _folder, paths):
    """It reads no codec.json, so it is given the sizes."""
    sizes, found = read_sizes(checkpoint), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "build_dac_codec", lambda: build_codec(sizes))
        for path in paths:
            samples, rate_hz = soundfile.read(path, dtype="float32")
            codes = host.encode_reference_audio_codes(
                str(checkpoint), samples.T, rate_hz, device="cpu"
            )
            found[path.stem, "codec"] = codes.numpy()
    host._codec_cache.clear()
    return found
