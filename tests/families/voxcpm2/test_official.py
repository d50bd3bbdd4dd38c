"""What voxcpm 2.0.3 keeps of a clip is ours as well, with the released sizes too."""

import numpy as np
import pytest

from tests.families.clip import Clip
from tests.families.conftest import load
from tests.families.voxcpm2 import official
from tests.families.voxcpm2.case import CASE
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.testing.clips import SPEECH
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

# These networks are too small to share.
pytestmark = pytest.mark.usefixtures("one_thread")


def features(encoder, path):
    return encoder.encode(decode_path(path).audio)["features"]


def test_what_the_official_package_keeps_of_a_prompt_is_ours(own_checkpoint, encoders):
    cache = official.load(own_checkpoint).build_prompt_cache(
        prompt_text="What was said in it.",
        prompt_wav_path=str(SPEECH.path),
        reference_wav_path=str(SPEECH.path),
    )
    for name, kept in (("reference", "ref_audio_feat"), ("continuation", "audio_feat")):
        expected = cache[kept].numpy()
        assert np.array_equal(features(encoders[name], SPEECH.path), expected)


@pytest.mark.long
def test_features_equal_the_official_ones_with_the_released_sizes(tmp_path):
    checkpoint = TinyCheckpoint(FAMILY, encoders="real").write(tmp_path / "real")
    model = official.load(checkpoint)
    encoders = load(CASE, checkpoint)
    path = Clip(44_100, 45_865, 2, "PCM_24").write(tmp_path)
    for name in official.SIDES:
        expected = official.features(model, path, name)
        assert np.array_equal(features(encoders[name], path), expected)
    (checkpoint / "audiovae.pth").unlink()  # 0.2 GB, which pytest would keep
