import pytest
import soundfile

from vllm_tts_cache.families.qwen3_tts.family import plausible_frames
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

FRAMES_PER_SECOND = 12.5


@pytest.mark.parametrize("clip", [SPEECH, OTHER_SPEECH], ids=["keeper", "bakery"])
def test_speech_takes_less_than_is_plausible_and_not_much_less(clip):
    spoken = soundfile.info(clip.path).duration * FRAMES_PER_SECOND
    assert spoken <= plausible_frames(clip.transcript) <= 4 * spoken


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 2.0), ("x" * 80, 12.0), ("灯" * 25, 12.0), ("한" * 25 + "x" * 48, 18.0)],
)
def test_an_ideogram_takes_as_long_as_some_three_letters(text, seconds):
    assert plausible_frames(text) == FRAMES_PER_SECOND * seconds
