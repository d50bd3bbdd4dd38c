"""Each figure moves by what was done to a clip."""

import functools

import numpy as np
import pytest
import soxr

from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.quality import check_clip
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

CLIPS = (SPEECH, OTHER_SPEECH)


@functools.cache
def speech(clip=SPEECH):
    audio = decode_path(clip.path).audio
    return audio.samples, audio.sample_rate_hz


def check(samples, rate, **given):
    return check_clip(ReferenceAudio.of(np.asarray(samples, np.float32), rate), **given)


def measures(samples, rate):
    return check(samples, rate).measures


def codes(quality):
    return {reason.code for reason in quality.reasons}


def white(num_samples, level_dbfs):
    noise = np.random.default_rng(0).normal(0, 10 ** (level_dbfs / 20), num_samples)
    return noise.astype(np.float32)


@pytest.mark.parametrize("clip", CLIPS)
def test_speech_is_found_in_a_clip_and_matches_its_transcript(clip):
    samples, rate = speech(clip)
    found = check(samples, rate, ref_text=clip.transcript)
    assert found.measures.duration_seconds == samples.size / rate
    assert found.measures.speech_share > 0.8
    assert found.measures.longest_pause_seconds < 1.0
    assert codes(found) <= {"little_speech", "narrow_band"}


def test_enough_clean_speech_is_good():
    samples, rate = speech()
    found = check(np.tile(samples, 2), rate)
    assert (found.verdict, found.reasons) == ("good", ())


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("quieter_db", [6, 20, 40])
def test_quieter_clip_is_quieter_and_nothing_else(clip, quieter_db):
    samples, rate = speech(clip)
    before = measures(samples, rate)
    after = measures(samples * np.float32(10 ** (-quieter_db / 20)), rate)
    loudness_lufs = before.loudness_lufs - quieter_db
    assert after.loudness_lufs == pytest.approx(loudness_lufs, abs=0.2)
    assert after.peak_dbfs == pytest.approx(before.peak_dbfs - quieter_db, abs=1e-3)
    assert after.speech_seconds == pytest.approx(before.speech_seconds, abs=0.04)
    assert after.snr_db == pytest.approx(before.snr_db, abs=0.1)
    assert after.bandwidth_hz == before.bandwidth_hz


def test_several_clips_have_speech_enough_together_and_a_bad_one_is_named():
    samples, rate = speech()
    short = samples[: 4 * rate]
    starts = (0, short.size)
    good = ReferenceAudio.of(np.tile(short, 2), rate, starts)
    alone = check(short, rate)
    assert "little_speech" in codes(alone)
    found = check_clip(good)
    assert found.measures.duration_seconds == 2 * short.size / rate
    assert codes(found) == codes(alone) - {"little_speech"}
    noisy = np.concatenate((short, short + white(short.size, -35)))
    found = check_clip(ReferenceAudio.of(noisy, rate, starts))
    noise = [r for r in found.reasons if r.code == "noisy" and r.verdict == "poor"]
    (said,) = [reason.message for reason in noise]
    assert said.startswith("audio_sample[1]: The speech is only")


def test_the_line_of_a_clip_is_compared_with_that_clip():
    (first, rate), (second, other_rate) = map(speech, CLIPS)
    assert rate == other_rate
    both = np.concatenate((first, second))
    audio = ReferenceAudio.of(both, rate, (0, first.size))
    lines = [clip.transcript for clip in CLIPS]
    found = check_clip(audio, ref_text="\n".join(lines))
    assert "transcript_mismatch" not in codes(found)
    found = check_clip(audio, ref_text=f"{lines[0]}\nno")
    (said,) = [r.message for r in found.reasons if r.code == "transcript_mismatch"]
    assert said.startswith("audio_sample[1]: The transcript")


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000, 192_000])
@pytest.mark.parametrize("seconds", [0.1, 0.39, 0.4, 3.0])
def test_loudness_of_the_standards_tone(rate, seconds):
    # ITU-R BS.1770: 997 Hz at full scale in one channel reads -3.01 LKFS.
    t = np.arange(round(seconds * rate)) / rate
    tone = 0.1 * np.sin(2 * np.pi * 997 * t)
    # What is shorter than a block begins as a step of the filters, and is repeated.
    tolerance = 0.1 if seconds >= 0.4 else 1.0
    assert measures(tone, rate).loudness_lufs == pytest.approx(-23.01, abs=tolerance)


@pytest.mark.parametrize("pause_seconds", [0.8, 1.5, 2.5, 6.0])
def test_inserted_pause_is_measured(pause_seconds):
    samples, rate = speech()
    silence = np.zeros(round(pause_seconds * rate), np.float32)
    whole = measures(samples, rate)
    parted = check(np.concatenate((samples, silence, samples)), rate)
    found = parted.measures
    # The clip itself begins and ends with a little silence.
    ends = whole.duration_seconds - whole.speech_seconds
    assert 0 <= found.longest_pause_seconds - pause_seconds <= ends + 0.1
    assert found.speech_seconds == pytest.approx(2 * whole.speech_seconds, abs=0.3)
    assert ("long_pause" in codes(parted)) == (found.longest_pause_seconds > 2.0)


@pytest.mark.parametrize(
    ("snr_db", "verdict"), [(45, None), (28, "fair"), (12, "poor")]
)
def test_known_ratio_of_speech_to_noise(snr_db, verdict):
    samples, rate = speech()
    doubled = np.tile(samples, 2)
    clean = measures(doubled, rate)
    spoken = np.sum(doubled.astype(np.float64) ** 2) / (clean.speech_seconds * rate)
    noise = white(doubled.size, 10 * np.log10(spoken) - snr_db)
    found = check(doubled + noise, rate)
    assert found.measures.snr_db == pytest.approx(snr_db, abs=1.5)
    assert {r.code: r.verdict for r in found.reasons}.get("noisy") == verdict


@pytest.mark.parametrize("gain", [2, 4, 10])
@pytest.mark.parametrize("after", [1.0, 0.5])
def test_flat_tops_are_counted_even_if_made_quieter_later(gain, after):
    samples, rate = speech()
    loud = samples / np.abs(samples).max() * gain
    cut = np.clip(loud, -1, 1) * np.float32(after)
    found = check(cut, rate)
    in_tops = np.mean(np.abs(loud) >= 1)
    # A top of n samples has n - 2 beginnings of three in a row.
    assert 0.2 * in_tops < found.measures.clipped_share < in_tops
    assert "clipped" in codes(found)


@pytest.mark.parametrize(
    ("held_hz", "verdict"), [(8_000, "poor"), (12_000, "fair"), (16_000, None)]
)
def test_bandwidth_is_that_of_the_sound_and_not_of_the_file(held_hz, verdict):
    samples, rate = speech()
    # Consonants to hear in every part of the band, which the clip's own filter takes.
    doubled = np.tile(samples, 2) + white(2 * samples.size, -45)
    held = soxr.resample(doubled, rate, held_hz)
    found = check(soxr.resample(held, held_hz, 48_000), 48_000)
    assert 0.85 * held_hz / 2 <= found.measures.bandwidth_hz <= held_hz / 2 + 250
    assert {r.code: r.verdict for r in found.reasons}.get("narrow_band") == verdict
