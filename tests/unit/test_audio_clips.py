"""Several clips of a voice: each is checked by itself, and an error says which."""

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from vllm_tts_cache.audio.decode import DecodedAudio, cut, decode, decode_clips
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import InvalidAudioError

LOW = voiced(peak=0.005)


def wav(samples, rate=24_000):
    return sndfile_bytes(samples, rate)


def test_clips_are_joined_as_each_of_them_is_decoded():
    files = [wav(voiced()), sndfile_bytes(voiced(seconds=1.5), 24_000, "FLAC")]
    joined = decode_clips(files)
    alone = [decode(data).audio.audio_sha256 for data in files]
    assert [clip.audio_sha256 for clip in joined.audio.clips()] == alone
    assert (joined.audio.seconds, joined.sources) == (3.5, tuple(files))


def test_a_warning_names_its_clip():
    assert decode_clips([wav(voiced())] * 2).warnings == ()
    (warning,) = decode_clips([wav(voiced()), wav(LOW)]).warnings
    assert warning.code == "low_level"
    assert warning.message.startswith("audio_sample[1]: the loudest")


def test_an_audio_is_cut_into_the_clips_that_it_was_joined_of():
    joined = decode_clips([wav(voiced()), wav(voiced(seconds=1.5))])
    one = ReferenceAudio.of(joined.audio.samples, 24_000)
    again = cut(DecodedAudio(one, ()), joined.audio.clip_starts)
    assert again.audio.audio_sha256 == joined.audio.audio_sha256


def test_a_cut_that_leaves_no_usable_clip_is_refused():
    samples = np.concatenate([voiced()[:, 0], np.zeros(48_000, np.float32)])
    decoded = DecodedAudio(ReferenceAudio.of(samples, 24_000), ())
    with pytest.raises(InvalidAudioError, match=r"\[0\]: it lasts 0.50 s"):
        cut(decoded, (0, 12_000))
    with pytest.raises(InvalidAudioError, match=r"\[1\]: it is silent"):
        cut(decoded, (0, 48_000))
    with pytest.raises(ValueError, match="clips cannot begin"):
        cut(decoded, (0, 96_000))
