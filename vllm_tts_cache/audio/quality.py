"""Measures a reference clip and judges how well it will clone; never refuses one.

Clips are refused by `audio.decode`, by the limits of the model and, on a server with
SPEAKER_MIN_QUALITY, by their verdict. Each rule names its source.

A transcript is compared with the clip by its length: syllables are estimated from the
script, for all languages in one way, so the bounds are wide. They find the transcript
of another clip, or of half of it, but no wrong word.
"""

import operator
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyloudnorm
import soxr

from vllm_tts_cache.audio.decode import (
    FULL_SCALE,
    LOW_LEVEL_DBFS,
    MAX_CLIPPED_SHARE,
    AudioWarning,
    clipped_share,
    decibels,
    name_of,
)
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.audio.speech_detector import Samples, Speech, find_speech

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
_MAX_SNR_DB = 80.0
_MIN_SNR_DB = -20.0


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
            from -20 to 80; None without speech.
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
        """Speech by the whole clip's duration."""
        return self.speech_seconds / self.duration_seconds


def measure(audio: ReferenceAudio) -> ClipMeasures:
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
    flat = np.abs(audio.samples) >= FULL_SCALE * min(peak, 1.0)
    speech = find_speech(samples, rate_hz)
    noise_db, snr_db = _noise(samples, rate_hz, speech)
    return ClipMeasures(
        duration_seconds=audio.seconds,
        loudness_lufs=_loudness_lufs(samples.astype(np.float64) * peak, rate_hz),
        peak_dbfs=peak_dbfs,
        clipped_share=clipped_share(flat) if peak >= _MIN_FLAT_PEAK else 0.0,
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
        return decibels(noise), None
    snr_db = decibels(float(np.mean(spoken)) - noise) - decibels(noise)
    return decibels(noise), min(max(snr_db, _MIN_SNR_DB), _MAX_SNR_DB)


Verdict = Literal["good", "fair", "poor"]
_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # from the best to the worst

# People read aloud at 5.2 (Mandarin) to 7.8 (Japanese) syllables a second on average.
# Source: Pellegrino, Coupé, Marsico, "A cross-language perspective on speech
# information rate", Language 87 (2011). The bounds, and their slack, are ours.
_MIN_SYLLABLES_PER_SECOND = 1.5
_MAX_SYLLABLES_PER_SECOND = 12.0
_SLACK_SYLLABLES = 4.0

# Europeans write 2.5 to 3 letters for a syllable; others fewer, without the vowels.
_PER_LETTER = 0.4
_PER_DIGIT = 1.5  # "7" is one syllable to three, "70" two to four
# A character is a syllable, or two in Japanese: kana, Chinese characters, Korean.
_SYLLABIC = (
    *((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF)),
    *((0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
)


@dataclass(frozen=True, slots=True)
class Reason:
    """A fault of a clip that a clone of it will suffer from.

    Attributes:
        code: Each at most once for a clip.
        message: One sentence, with what to do about it.
    """

    code: str
    message: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The bounds at which one figure makes a clip fair or poor.

    Attributes:
        figure: None if it was not measured.
        fair: Beyond this bound the clip is fair. A value equal to a bound gets the
            better verdict.
        poor: Beyond this bound the clip is poor; None if it never is.
        high_is_good: Whether a figure below the bounds is beyond them.
        message: Format string of the reason's; ``value`` is the figure, in its unit.
    """

    code: str
    figure: Callable[[ClipMeasures], float | None]
    fair: float
    poor: float | None = None
    high_is_good: bool = True
    message: str
    source: str

    def reason(self, measures: ClipMeasures) -> Reason | None:
        """Return the fault that the figure shows, if it is beyond a bound."""
        value = self.figure(measures)
        is_beyond = operator.lt if self.high_is_good else operator.gt
        if value is None or not is_beyond(value, self.fair):
            return None
        is_poor = self.poor is not None and is_beyond(value, self.poor)
        message = self.message.format(value=value)
        return Reason(self.code, message, "poor" if is_poor else "fair")


_ALIBABA = "alibabacloud.com/help/en/model-studio/qwen-tts-voice-cloning"
_AZURE = (
    "learn.microsoft.com/azure/ai-services/speech-service/record-custom-voice-samples"
)
_CARTESIA = "docs.cartesia.ai/build-with-cartesia/capability-guides/clone-voices"
_ELEVENLABS = (
    "elevenlabs.io/docs/product-guides/voices/voice-cloning/instant-voice-cloning"
)
_INWORLD = "docs.inworld.ai/tts/voice-cloning"

# A figure that is 0 because there is no speech counts as not measured.
RULES = (
    Rule(
        code="little_speech",
        figure=lambda m: m.speech_seconds or None,
        fair=5.0,
        poor=3.0,
        message="It holds {value:.1f} s of speech; record 5 to 15 s.",
        source=f"5 to 15 s ({_INWORLD}); 3 s are required ({_ALIBABA})",
    ),
    Rule(
        code="much_silence",
        figure=lambda m: m.speech_share or None,
        fair=0.5,
        poor=0.25,
        message="Only {value:.0%} of it is speech; cut the silence off.",
        source="ours",
    ),
    Rule(
        code="long_pause",
        figure=lambda m: m.longest_pause_seconds,
        fair=2.0,
        high_is_good=False,
        message="It pauses for {value:.1f} s, and the voice will pause like that; "
        "cut pauses to 2 s or less.",
        source=f"pauses of 2 s at most ({_ALIBABA}); long ones make a clone drift "
        f"({_CARTESIA})",
    ),
    Rule(
        code="noisy",
        figure=lambda m: m.snr_db,
        fair=35.0,
        poor=20.0,
        message="The speech is only {value:.0f} dB above the noise; record in a "
        "quieter place, closer to the microphone.",
        source=f"above 35 dB in studios, below 20 dB heard in the clone ({_AZURE})",
    ),
    Rule(
        code="clipped",
        figure=lambda m: m.clipped_share,
        fair=MAX_CLIPPED_SHARE,
        poor=10 * MAX_CLIPPED_SHARE,
        high_is_good=False,
        message="{value:.2%} of its samples are cut off at the top; record with less "
        "gain.",
        source=f"never cut off ({_AZURE}); the shares are ours",
    ),
    Rule(
        code="quiet",
        figure=lambda m: m.loudness_lufs,
        fair=-33.0,
        poor=LOW_LEVEL_DBFS,
        message="It is quiet ({value:.0f} LUFS); record at about -20 LUFS.",
        source=f"-23 to -18 dB RMS ({_ELEVENLABS}); 10 dB of leave, and poor, are ours",
    ),
    Rule(
        code="loud",
        figure=lambda m: m.loudness_lufs,
        fair=-10.0,
        high_is_good=False,
        message="It is very loud ({value:.0f} LUFS); record at about -20 LUFS, without "
        "a compressor.",
        source=f"-23 to -18 dB RMS ({_ELEVENLABS}); 8 dB of leave are ours",
    ),
    Rule(
        code="narrow_band",
        figure=lambda m: m.bandwidth_hz,
        fair=7_000.0,
        poor=4_500.0,
        message="It holds nothing above {value:.0f} Hz, whatever its sample rate; "
        "record at 24 kHz or more, and not over a telephone.",
        source=f"sampled at 16 kHz at least, better at 24 kHz ({_AZURE}), less what "
        "filters take; telephones end at 3.4 kHz",
    ),
)
# Rules that several clips have to keep together, and not each by itself.
_OF_ALL_CLIPS = ("little_speech",)


def reasons_of(measures: ClipMeasures) -> Iterator[Reason]:
    """The faults that the figures of a clip show."""
    if measures.speech_seconds == 0:
        message = "It holds no speech; send a recording of one person who speaks."
        yield Reason("no_speech", message, "poor")
    yield from filter(None, (rule.reason(measures) for rule in RULES))


def is_below(verdict: Verdict, wanted: Verdict) -> bool:
    """Tell whether a verdict is worse than another one."""
    return _VERDICTS.index(verdict) > _VERDICTS.index(wanted)


def worst(reasons: Sequence[Reason]) -> Verdict:
    """The worst verdict of these reasons; good if there are none."""
    found = {reason.verdict for reason in reasons}
    return "poor" if "poor" in found else "fair" if "fair" in found else "good"


@dataclass(frozen=True, slots=True)
class ClipQuality:
    """The measures and the verdict of a clip.

    Attributes:
        verdict: ``poor``: record again; ``fair``: look at the reasons.
    """

    measures: ClipMeasures
    verdict: Verdict
    reasons: tuple[Reason, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, rounded; None for what was not measured."""
        found = self.measures
        return {
            "verdict": self.verdict,
            "reasons": [{"code": r.code, "message": r.message} for r in self.reasons],
            "duration_seconds": round(found.duration_seconds, 3),
            "speech_seconds": round(found.speech_seconds, 2),
            "speech_share": round(found.speech_share, 3),
            "longest_pause_seconds": round(found.longest_pause_seconds, 2),
            "loudness_lufs": _rounded(found.loudness_lufs),
            "peak_dbfs": _rounded(found.peak_dbfs),
            "clipped_share": round(found.clipped_share, 5),
            "noise_dbfs": _rounded(found.noise_dbfs),
            "snr_db": _rounded(found.snr_db),
            "bandwidth_hz": found.bandwidth_hz,
        }


def _rounded(decibels: float | None) -> float | None:
    return None if decibels is None else round(decibels, 1)


def check_clip(
    audio: ReferenceAudio,
    *,
    ref_text: str | None = None,
    model_problem: str | None = None,
    warnings: Sequence[AudioWarning] = (),
) -> ClipQuality:
    """Measure a clip and judge it, in any thread but an event loop's.

    The figures of several clips, and whether they hold enough speech, are those of
    all together; any other reason names its clip.

    Args:
        audio: As it was decoded, at its own rate.
        ref_text: The transcript; of several clips a line for each.
        model_problem: Why the model that is served does not take the clip, as
            `ClipLimits.problem` says it.
        warnings: The decoder's, if they are to be among the reasons.

    Raises: ConfigError: The detector is not installed.
    """
    reasons: list[Reason] = []
    if model_problem is not None:
        problem = f"{model_problem[:1].upper()}{model_problem[1:]}."
        reasons.append(Reason("model_limits", problem, "poor"))
    reasons += (
        Reason(warning.code, warning.message, "fair")
        for warning in warnings
        if warning.code not in ("low_level", "clipping")  # which are measured here
    )
    measures = measure(audio)
    if audio.num_clips == 1:
        reasons += _reasons_of_clip(measures, ref_text or "")
    else:
        reasons += (r for r in reasons_of(measures) if r.code in _OF_ALL_CLIPS)
        reasons += _reasons_of_each_clip(audio, (ref_text or "").split("\n"))
    return ClipQuality(measures, worst(reasons), tuple(reasons))


def _reasons_of_each_clip(
    audio: ReferenceAudio, texts: Sequence[str]
) -> Iterator[Reason]:
    for index, clip in enumerate(audio.clips()):
        text = texts[index] if index < len(texts) else ""
        for reason in _reasons_of_clip(measure(clip), text):
            if reason.code not in _OF_ALL_CLIPS:
                yield replace(reason, message=f"{name_of(index)}: {reason.message}")


def _reasons_of_clip(measures: ClipMeasures, ref_text: str) -> Iterator[Reason]:
    yield from reasons_of(measures)
    seconds = measures.speech_seconds
    # A form sends an empty field for no transcript.
    if seconds and ref_text.strip() and not is_plausible(ref_text, seconds):
        yield Reason(
            "transcript_mismatch",
            f"The transcript probably does not match the clip, which holds "
            f"{seconds:.1f} s of speech; write down all that is said in it, and "
            "nothing else.",
            "poor",
        )


def is_plausible(text: str, speech_seconds: float) -> bool:
    """Tell whether a text can be spoken in so much speech, pauses left out."""
    # NFC composes the letters of Korean into syllables.
    syllables = sum(map(_syllables, unicodedata.normalize("NFC", text)))
    least = _MIN_SYLLABLES_PER_SECOND * speech_seconds - _SLACK_SYLLABLES
    most = _MAX_SYLLABLES_PER_SECOND * speech_seconds + _SLACK_SYLLABLES
    return least <= syllables <= most


def _syllables(char: str) -> float:
    if any(first <= ord(char) <= last for first, last in _SYLLABIC):
        return 1.0
    if char.isdigit():
        return _PER_DIGIT
    return _PER_LETTER if char.isalpha() else 0.0
