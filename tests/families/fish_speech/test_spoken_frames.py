import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tts_cache.families.fish_speech.spoken_frames import SpokenFrames


def frame(number):
    return torch.arange(10)[None] + 10 * number


def speak(frames, name, begin, end):
    for position in range(begin, end):
        frames.will_speak(name, position)
        frames.saw(name, frame(position))


def assert_said(frames, name, begin, end):
    codes = frames.between(name, begin, end)
    expected = [frame(position)[0].tolist() for position in range(begin, end)]
    assert codes.tolist() == expected


@settings(deadline=None)  # a busy machine takes longer
@given(st.integers(0, 50), st.integers(1, 600), st.data())
def test_frames_are_kept_by_position(first, num_frames, data):
    frames = SpokenFrames()
    speak(frames, "one", first, first + num_frames)
    speak(frames, "other", 7, 9)
    begin = data.draw(st.integers(first, first + num_frames))
    end = data.draw(st.integers(begin, first + num_frames))
    assert_said(frames, "one", begin, end)
    assert frames.between("one", begin, first + num_frames + 1) is None
    assert frames.between("one", first - 1, end) is None
    assert frames.between("nobody", begin, end) is None


def test_a_frame_is_what_came_of_the_last_announcement():
    frames = SpokenFrames()
    frames.saw("one", frame(0))  # of its prefill
    assert "one" not in frames
    frames.will_speak("one", 5)
    frames.saw("one", None)
    frames.saw("one", frame(5))
    frames.saw("one", frame(99))  # the same buffer, looked at again
    assert_said(frames, "one", 5, 6)


def test_what_is_spoken_again_takes_the_place_of_what_was():
    frames = SpokenFrames()
    speak(frames, "one", 5, 9)
    frames.will_speak("one", 7)
    frames.saw("one", frame(70))
    assert_said(frames, "one", 5, 7)
    again = frames.between("one", 7, 8)
    assert again is not None
    assert again.tolist() == frame(70).tolist()
    assert frames.between("one", 7, 9) is None, "what came after it was another"


def test_after_a_gap_nothing_before_it_is_told():
    frames = SpokenFrames()
    speak(frames, "one", 5, 7)
    speak(frames, "one", 9, 11)
    assert frames.between("one", 5, 7) is None
    assert_said(frames, "one", 9, 11)
