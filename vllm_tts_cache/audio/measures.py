"""What is measured of a clip: its level, its bandwidth, its speech and its noise."""

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyloudnorm
import soxr

from vllm_tts_cache.audio.limits import FULL_SCALE, clipped_share
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.audio.speech_detector import Speech, SpeechDetector

_BIN_HZ = 25
_BAND_HZ = 250
# Against the strongest band. Speech itself falls by 30 to 45 dB towards 16 kHz; what a
# good resampler leaves above the old rate's half lies 80 dB below and more.
_MIN_POWER = 1e-6  # -60 dB
# pyloudnorm's own default only comes near the filters of ITU-R BS.1770; these are they.
_FILTERS = "DeMan"
_BLOCK_SECONDS = 0.4  # of the standard's gate
# Of a clip that was made quieter after it had been cut off, the tops lie below full
# scale; of one that peaks below this, steps of 16 bits would look like tops.
_MIN_FLAT_PEAK = 0.1
# pyloudnorm silences warnings while it computes, which it does for the whole process:
# two threads at once could leave them silenced.
_METER = threading.Lock()

# What is above its half is heard by nobody and by no encoder.
_MAX_RATE_HZ = 48_000
_SILENT_PEAK = 1e-10  # -200 dBFS stands for digital silence

_FRAMES_PER_SECOND = 50
# A room answers for as long, and a word is fading: that is no noise yet.
_FADES_SECONDS = 0.1
_MIN_NOISE_FRAMES = 5  # 0.1 s
_QUIETEST = 10  # one frame in so many

# Digital silence is no noise at all; and noise may be all there is.
MAX_SNR_DB = 80.0
MIN_SNR_DB = -20.0
_FLOOR_POWER = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipMeasures:
    """Figures of a clip; all of them are finite.

    Attributes:
        loudness_lufs: Integrated, by ITU-R BS.1770-4; None below its gate of -70 LUFS.
        peak_dbfs: Of the samples; None for digital silence.
        clipped_share: Share of samples in flat tops.
        speech_seconds: How long somebody speaks, pauses not counted.
        longest_pause_seconds: Between words, not before the first or after the last.
        noise_dbfs: RMS where nobody speaks; None for digital silence.
        snr_db: The speech above that noise; None without speech.
        bandwidth_hz: Up to where there is energy, 24 kHz at most; None where nothing
            can be told.
    """

    duration_seconds: float
    loudness_lufs: float | None = None
    peak_dbfs: float | None = None
    clipped_share: float = 0.0
    speech_seconds: float = 0.0
    longest_pause_seconds: float = 0.0
    noise_dbfs: float | None = None
    snr_db: float | None = None
    bandwidth_hz: int | None = None

    @property
    def speech_share(self) -> float:
        """Share of the clip in which somebody speaks."""
        return self.speech_seconds / self.duration_seconds


def measure(audio: ReferenceAudio, detector: SpeechDetector) -> ClipMeasures:
    """Measure a clip; safe in any thread, it takes up to a second of CPU."""
    peak = float(np.max(np.abs(audio.samples)))
    if peak < _SILENT_PEAK:
        return ClipMeasures(duration_seconds=audio.seconds)
    # Most is measured of a clip that peaks at 1, and moved back: samples may be
    # anything that float32 holds, whose squares it does not.
    at_one = np.divide(audio.samples, peak, dtype=np.float32)
    samples, rate_hz = _audible(at_one, audio.sample_rate_hz)
    peak_dbfs = 20 * float(np.log10(peak))
    speech = detector.find(samples, rate_hz)
    noise = noise_of(samples, rate_hz, speech)
    return ClipMeasures(
        duration_seconds=audio.seconds,
        loudness_lufs=loudness_lufs(samples.astype(np.float64) * peak, rate_hz),
        peak_dbfs=peak_dbfs,
        clipped_share=cut_off_share(audio.samples, peak),
        speech_seconds=speech.seconds,
        longest_pause_seconds=speech.longest_pause_seconds,
        noise_dbfs=noise.level_dbfs + peak_dbfs,
        snr_db=noise.snr_db,
        bandwidth_hz=bandwidth_hz(samples, rate_hz, speech),
    )


def _audible(
    samples: npt.NDArray[np.float32], sample_rate_hz: int
) -> tuple[npt.NDArray[np.float32], int]:
    if sample_rate_hz <= _MAX_RATE_HZ:
        return samples, sample_rate_hz
    lower = soxr.resample(samples, sample_rate_hz, _MAX_RATE_HZ, quality="HQ")
    # A few samples make none of the lower rate.
    return (lower, _MAX_RATE_HZ) if lower.size else (samples, sample_rate_hz)


def bandwidth_hz(
    samples: npt.NDArray[np.float32], sample_rate_hz: int, speech: Speech
) -> int | None:
    """The upper edge of the highest band of 250 Hz with energy, while somebody speaks.

    None for audio that is silent, or shorter than 40 ms. Noise is energy as well.
    """
    size = sample_rate_hz // _BIN_HZ
    frames = samples[: samples.size // size * size].reshape(-1, size)
    centres = (np.arange(len(frames)) + 0.5) * size / sample_rate_hz
    spoken = speech.covers(centres)
    power = _mean_power(frames[spoken] if spoken.any() else frames)
    per_band = _BAND_HZ // _BIN_HZ
    bands = power[1 : 1 + (power.size - 1) // per_band * per_band]
    # Not the mean, which one whistling tone would decide.
    level = np.median(bands.reshape(-1, per_band), axis=1)
    (held,) = np.nonzero((level > 0) & (level >= level.max(initial=0) * _MIN_POWER))
    return int(held[-1] + 1) * _BAND_HZ if held.size else None


def _mean_power(frames: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """``(num_bins,)``, the first of them at 0 Hz."""
    num_frames, size = frames.shape
    if num_frames == 0:
        return np.zeros(1)
    spectra = np.fft.rfft(frames * np.hanning(size).astype(np.float32), axis=1)
    return np.mean(np.abs(spectra).astype(np.float64) ** 2, axis=0)


def loudness_lufs(
    samples: npt.NDArray[np.float64], sample_rate_hz: int
) -> float | None:
    """Integrated loudness by ITU-R BS.1770-4 of ``(num_samples,)`` mono audio.

    What is shorter than the standard's block of 0.4 s is repeated until it fills one.
    None if no block is above the standard's gate of -70 LUFS.
    """
    num_samples = max(samples.size, int(np.ceil(_BLOCK_SECONDS * sample_rate_hz)))
    filled = np.resize(samples, num_samples)
    with _METER:
        meter = pyloudnorm.Meter(sample_rate_hz, filter_class=_FILTERS)
        loudness = float(meter.integrated_loudness(filled))
    return loudness if np.isfinite(loudness) else None


def cut_off_share(samples: npt.NDArray[np.float32], peak: float) -> float:
    """Share of samples in flat tops, at full scale or at the clip's own peak."""
    if peak < _MIN_FLAT_PEAK:
        return 0.0
    return clipped_share(np.abs(samples) >= FULL_SCALE * min(peak, 1.0))


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise in a clip.

    Attributes:
        level_dbfs: RMS of the parts where nobody speaks, at their median.
        snr_db: How far the RMS of the speech, less the noise, lies above it, within
            ``MIN_SNR_DB`` and ``MAX_SNR_DB``; None without speech.
    """

    level_dbfs: float
    snr_db: float | None


def noise_of(
    samples: npt.NDArray[np.float32], sample_rate_hz: int, speech: Speech
) -> Noise:
    """Estimate the noise of ``(num_samples,)`` audio.

    Where nobody ever pauses, the quietest tenth of the clip stands for the noise: that
    is more than there is, rather than less.
    """
    size = min(samples.size, sample_rate_hz // _FRAMES_PER_SECOND)
    frames = samples[: samples.size // size * size].reshape(-1, size)
    power = np.var(frames, axis=1, dtype=np.float64)
    centres = (np.arange(power.size) + 0.5) * size / sample_rate_hz
    noise = _noise_power(power, speech.covers(centres, _FADES_SECONDS))
    spoken = power[speech.covers(centres)]
    if spoken.size == 0:
        return Noise(_db(noise), None)
    snr_db = _db(float(np.mean(spoken)) - noise) - _db(noise)
    return Noise(_db(noise), min(max(snr_db, MIN_SNR_DB), MAX_SNR_DB))


def _noise_power(power: npt.NDArray[np.float64], near: npt.NDArray[np.bool_]) -> float:
    apart = power[~near]
    if apart.size >= _MIN_NOISE_FRAMES:
        # Not the mean, which one breath or one click would decide.
        return float(np.median(apart))
    quietest = max(1, power.size // _QUIETEST)
    return float(np.mean(np.sort(power)[:quietest]))


def _db(power: float) -> float:
    return float(10 * np.log10(max(power, _FLOOR_POWER)))
