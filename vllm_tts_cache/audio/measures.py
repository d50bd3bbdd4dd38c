"""Measures of a clip: its level, its bandwidth, its speech and its noise."""

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyloudnorm
import soxr

from vllm_tts_cache.audio.limits import FULL_SCALE, clipped_share
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.audio.speech_detector import Samples, Speech, SpeechDetector

_BIN_HZ = 25
_BAND_HZ = 250
# Against the strongest band. Speech itself falls by 30 to 45 dB towards 16 kHz; a good
# resampler leaves at most -80 dB above half of the old rate.
_MIN_POWER = 1e-6  # -60 dB
# pyloudnorm's default only approximates the filters of ITU-R BS.1770.
_FILTERS = "DeMan"
_BLOCK_SECONDS = 0.4  # of the standard's gate
# A clip that was made quieter after clipping has its flat tops below full scale; in one
# that peaks below this, steps of 16 bits would look like flat tops.
_MIN_FLAT_PEAK = 0.1
# pyloudnorm silences warnings of the whole process while it computes: two threads at
# once could leave them silenced.
_METER = threading.Lock()

_MAX_RATE_HZ = 48_000  # no listener and no encoder hears above half of it
_SILENT_PEAK = 1e-10  # -200 dBFS stands for digital silence

_FRAMES_PER_SECOND = 50
_FADES_SECONDS = 0.1  # how long a word fades, and a room echoes
_MIN_NOISE_FRAMES = 5  # 0.1 s
_QUIETEST = 10  # the quietest tenth of the frames stands for noise

# The ratio is infinite without noise, and minus infinite where speech is no louder.
MAX_SNR_DB = 80.0
MIN_SNR_DB = -20.0
_FLOOR_POWER = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipMeasures:
    """Figures of a clip; all of them are finite.

    Attributes:
        loudness_lufs: Integrated, by ITU-R BS.1770-4; None below its gate of -70 LUFS.
        peak_dbfs: Of the samples; None for digital silence.
        clipped_share: Share of samples in flat tops, at full scale or at the clip's
            own peak.
        speech_seconds: Without pauses.
        longest_pause_seconds: Between words, not before the first or after the last.
        noise_dbfs: Median RMS of the parts without speech; None for digital silence.
        snr_db: How far the RMS of the speech, less the noise, lies above the noise,
            within ``MIN_SNR_DB`` and ``MAX_SNR_DB``; None without speech.
        bandwidth_hz: The highest frequency with energy, 24 kHz at most; None for a clip
            that is silent or shorter than 40 ms.
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
        """Share of the clip that is speech."""
        return self.speech_seconds / self.duration_seconds


def measure(audio: ReferenceAudio, detector: SpeechDetector) -> ClipMeasures:
    """Measure a clip; safe in any thread, it takes up to a second of CPU."""
    peak = float(np.max(np.abs(audio.samples)))
    if peak < _SILENT_PEAK:
        return ClipMeasures(duration_seconds=audio.seconds)
    # Scaled to a peak of 1: the squares of large float32 samples overflow.
    samples = np.divide(audio.samples, peak, dtype=np.float32)
    rate_hz = audio.sample_rate_hz
    if rate_hz > _MAX_RATE_HZ:
        lower = soxr.resample(samples, rate_hz, _MAX_RATE_HZ, quality="HQ")
        if lower.size:  # a few samples make none of the lower rate
            samples, rate_hz = lower, _MAX_RATE_HZ
    peak_dbfs = 20 * float(np.log10(peak))
    clipped = 0.0
    if peak >= _MIN_FLAT_PEAK:
        clipped = clipped_share(np.abs(audio.samples) >= FULL_SCALE * min(peak, 1.0))
    speech = detector.find(samples, rate_hz)
    noise_db, snr_db = _noise(samples, rate_hz, speech)
    return ClipMeasures(
        duration_seconds=audio.seconds,
        loudness_lufs=_loudness_lufs(samples.astype(np.float64) * peak, rate_hz),
        peak_dbfs=peak_dbfs,
        clipped_share=clipped,
        speech_seconds=speech.seconds,
        longest_pause_seconds=speech.longest_pause_seconds,
        noise_dbfs=noise_db + peak_dbfs,
        snr_db=snr_db,
        bandwidth_hz=_bandwidth_hz(samples, rate_hz, speech),
    )


def _bandwidth_hz(samples: Samples, sample_rate_hz: int, speech: Speech) -> int | None:
    """The upper edge of the highest band of 250 Hz with energy, noise included."""
    size = sample_rate_hz // _BIN_HZ
    frames = samples[: samples.size // size * size].reshape(-1, size)
    spoken = speech.covers((np.arange(len(frames)) + 0.5) * size / sample_rate_hz)
    frames = frames[spoken] if spoken.any() else frames
    if len(frames) == 0:
        return None
    spectra = np.fft.rfft(frames * np.hanning(size).astype(np.float32), axis=1)
    power = np.mean(np.abs(spectra).astype(np.float64) ** 2, axis=0)
    per_band = _BAND_HZ // _BIN_HZ
    bands = power[1 : 1 + (power.size - 1) // per_band * per_band]
    # The median, as one whistling tone would decide the mean.
    level = np.median(bands.reshape(-1, per_band), axis=1)
    (held,) = np.nonzero((level > 0) & (level >= level.max(initial=0) * _MIN_POWER))
    return int(held[-1] + 1) * _BAND_HZ if held.size else None


def _loudness_lufs(
    samples: npt.NDArray[np.float64], sample_rate_hz: int
) -> float | None:
    num_samples = max(samples.size, int(np.ceil(_BLOCK_SECONDS * sample_rate_hz)))
    filled = np.resize(samples, num_samples)  # repeated until it fills a block
    with _METER:
        meter = pyloudnorm.Meter(sample_rate_hz, filter_class=_FILTERS)
        loudness = float(meter.integrated_loudness(filled))
    return loudness if np.isfinite(loudness) else None


def _noise(
    samples: Samples, sample_rate_hz: int, speech: Speech
) -> tuple[float, float | None]:
    """The level of the noise and the speech above it, both in dB.

    In a clip without pauses its quietest tenth stands for the noise: so the noise is
    overestimated rather than underestimated.
    """
    size = min(samples.size, sample_rate_hz // _FRAMES_PER_SECOND)
    frames = samples[: samples.size // size * size].reshape(-1, size)
    power = np.var(frames, axis=1, dtype=np.float64)
    centres = (np.arange(power.size) + 0.5) * size / sample_rate_hz
    pauses = power[~speech.covers(centres, _FADES_SECONDS)]
    if pauses.size >= _MIN_NOISE_FRAMES:
        # The median, as one breath or one click would decide the mean.
        noise = float(np.median(pauses))
    else:
        noise = float(np.mean(np.sort(power)[: max(1, power.size // _QUIETEST)]))
    spoken = power[speech.covers(centres)]
    if spoken.size == 0:
        return _db(noise), None
    snr_db = _db(float(np.mean(spoken)) - noise) - _db(noise)
    return _db(noise), min(max(snr_db, MIN_SNR_DB), MAX_SNR_DB)


def _db(power: float) -> float:
    return float(10 * np.log10(max(power, _FLOOR_POWER)))
