"""What is used of our encodings is what the official front end uses.

The encodings are compared in the shared `test_official`.
"""

import pytest

from tests.families.cosyvoice3 import official
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.cosyvoice3.positions import used_tokens


@pytest.mark.usefixtures("one_thread")  # sums over several are shared otherwise
@pytest.mark.parametrize("clip", official.CLIPS, ids=lambda clip: clip.stem)
def test_as_many_tokens_and_frames_are_used_as_officially(clip, encoders, tmp_path):
    audio = decode_path(clip.write(tmp_path)).audio
    tokens, frames = (
        encoders[name].encode(audio)[name] for name in ("speech_tokens", "mel")
    )
    expected, expected_frames = official.used(tokens, frames)
    num_used = used_tokens(len(tokens), len(frames))
    assert num_used == len(expected)
    assert 2 * num_used == len(expected_frames)
