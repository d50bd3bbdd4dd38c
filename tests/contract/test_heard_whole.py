"""A clip is what FFmpeg hears of it, in length and samples."""

import numpy as np
import pytest
import soxr

from tests import heard_files
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.errors import InvalidAudioError

MAX_SECONDS_APART = 0.02
# Encoders pad up to 0.11 s; more is another part of the clip.
MAX_PADDING_SECONDS = 0.2


def correlation(ours, theirs):
    """The normalised one, at the lag of up to 20 ms at which it is the greatest."""
    size = min(ours.size, theirs.size)
    ours, theirs = ours[:size].astype(float), theirs[:size].astype(float)
    spectrum = np.fft.rfft(ours, 2 * size) * np.conj(np.fft.rfft(theirs, 2 * size))
    products = np.fft.irfft(spectrum, 2 * size)
    lags = round(MAX_SECONDS_APART * heard_files.RATE)
    near = np.concatenate((products[:lags], products[-lags:]))
    return near.max() / np.sqrt((ours**2).sum() * (theirs**2).sum())


def resampled(audio):
    return soxr.resample(audio.samples, audio.sample_rate_hz, heard_files.RATE)


def codes(decoded):
    return [warning.code for warning in decoded.warnings]


# One in four in each run: most differ from their neighbours by a head or a tail.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if number % 4 else ())
        for number, name in enumerate(heard_files.FORMS)
    ],
)
def test_a_file_is_heard_whole_and_as_ffmpeg_hears_it(name):
    form = heard_files.FORMS[name]
    theirs = heard_files.heard_by_ffmpeg(name)
    decoded = decode(form.make())
    seconds = decoded.audio.seconds
    assert seconds == pytest.approx(
        theirs.size / heard_files.RATE, abs=MAX_SECONDS_APART
    )
    expected = form.num_clips * heard_files.SECONDS
    assert seconds == pytest.approx(expected, abs=MAX_PADDING_SECONDS * form.num_clips)
    assert codes(decoded) == form.warnings
    # Whatever its head says that it was recorded at.
    is_opus = "Opus" in name or (name.endswith("WebM") and "Vorbis" not in name)
    assert not is_opus or decoded.audio.sample_rate_hz == 48_000
    ours = resampled(decoded.audio)
    # What was joined need not be joined at the same sample.
    half = theirs.size // 2
    assert correlation(ours[:half], theirs[:half]) >= 0.98
    assert correlation(ours[half:], theirs[half:]) >= 0.98


@pytest.mark.parametrize("share", [0.613, pytest.param(0.9, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", heard_files.CUT)
def test_a_file_that_breaks_off_is_warned_of_or_refused(name, share):
    whole = heard_files.CUT[name]()
    data = whole[: int(len(whole) * share)]
    theirs = heard_files.piece_heard_by_ffmpeg(data)
    if theirs.size == 0:
        with pytest.raises(InvalidAudioError, match="breaks off"):
            decode(data)
        return
    decoded = decode(data)
    seconds = decoded.audio.seconds
    assert seconds == pytest.approx(
        theirs.size / heard_files.RATE, abs=MAX_SECONDS_APART
    )
    assert codes(decoded) == ["truncated"]
    assert f"Only {seconds:.2f} s" in decoded.warnings[0].message


@pytest.mark.parametrize("name", heard_files.CUT)
def test_a_hole_is_warned_of_and_what_is_behind_it_is_heard(name):
    data = bytearray(heard_files.CUT[name]())
    middle = len(data) // 2
    data[middle : middle + 1_500] = bytes(1_500)
    decoded = decode(bytes(data))
    assert decoded.audio.seconds > 0.4 * heard_files.SECONDS
    assert name == "WAV" or codes(decoded) == ["truncated"]  # zeros are samples


@pytest.mark.parametrize("name", heard_files.REFUSED)
def test_what_is_not_accepted_is_refused_for_the_reason_of_its_kind(name):
    make, reason = heard_files.REFUSED[name]
    with pytest.raises(InvalidAudioError, match=reason):
        decode(make())


def test_decoding_writes_nothing_to_standard_error(capfd):
    """A decoder of MP3 did, of a file that is longer than its Xing header says."""
    for name in ("joined MP3: Xing", "MP3 from byte 100 on", "joined Vorbis"):
        decode(heard_files.FORMS[name].make())
    with pytest.raises(InvalidAudioError):
        decode(b"RIFF\0\0\0\0WAVEfmt " + bytes(100))
    assert capfd.readouterr() == ("", "")
