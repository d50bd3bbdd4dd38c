import numpy as np
import pytest
import soundfile

from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH


@pytest.mark.parametrize("clip", [SPEECH, OTHER_SPEECH])
def test_a_clip_is_a_few_seconds_of_audible_mono_speech(clip):
    info = soundfile.info(clip.path)
    assert (info.format, info.subtype, info.channels) == ("FLAC", "PCM_16", 1)
    assert 4 <= info.duration <= 8
    samples, _ = soundfile.read(clip.path)
    assert 0.03 < np.sqrt(np.mean(samples**2)) < 0.3
    assert 0.4 < np.abs(samples).max() < 1.0
    assert clip.path.stat().st_size < 100_000
    assert clip.transcript.endswith(".")


def test_the_two_clips_differ_in_words_and_sound():
    assert SPEECH.transcript != OTHER_SPEECH.transcript
    assert SPEECH.path.read_bytes() != OTHER_SPEECH.path.read_bytes()
