"""What is measured of a clip."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import soxr

from vllm_tts_cache.audio.quality.bandwidth import bandwidth_hz
from vllm_tts_cache.audio.quality.levels import cut_off_share, loudness_lufs
from vllm_tts_cache.audio.quality.noise import noise_of
from vllm_tts_cache.audio.quality.speech import SpeechDetector
from vllm_tts_cache.audio.reference import ReferenceAudio

# What is above its half is heard by nobody and by no encoder.
_MAX_RATE_HZ = 48_000
_SILENT_PEAK = 1e-10  # -200 dBFS stands for digital silence


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
