"""What is used of our encodings is what the official front end uses.

The encodings are compared in the shared `test_official`.
"""

import pytest

from tests.families.cosyvoice3 import official
from tests.torch_threads import on_threads
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.cosyvoice3.positions import used_tokens


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the encode thread has: sums over several are shared otherwise."""
    with on_threads(1):
        yield


def encoded(encoders, name, path):
    return encoders[name].encode(decode_path(path).audio)[name]


@pytest.mark.parametrize("clip", official.CLIPS, ids=lambda clip: clip.stem)
def test_as_many_tokens_and_frames_are_used_as_officially(clip, encoders, tmp_path):
    path = clip.write(tmp_path)
    tokens = encoded(encoders, "speech_tokens", path)
    frames = encoded(encoders, "mel", path)
    expected, expected_frames = official.used(tokens, frames)
    num_used = used_tokens(len(tokens), len(frames))
    assert num_used == len(expected)
    assert 2 * num_used == len(expected_frames)
