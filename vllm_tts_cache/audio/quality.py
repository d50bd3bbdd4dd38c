"""Judges how well a reference clip will clone, and never refuses one.

Clips are refused by `audio.limits`, by the limits of the model and, on a server with
SPEAKER_MIN_QUALITY, by their verdict. Each rule names its source.

A transcript is compared with the clip by its length: syllables are estimated from the
script, for all languages in one way, so the bounds are wide. They find the transcript
of another clip, or of half of it, but no wrong word.
"""

import operator
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any, Literal, get_args

from vllm_tts_cache.audio.decode import name_of
from vllm_tts_cache.audio.limits import LOW_LEVEL_DBFS, MAX_CLIPPED_SHARE, AudioWarning
from vllm_tts_cache.audio.measures import ClipMeasures, measure
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.audio.speech_detector import SpeechDetector

Verdict = Literal["good", "fair", "poor"]

# People read aloud at 5.2 (Mandarin) to 7.8 (Japanese) syllables a second on average.
# Source: Pellegrino, Coupé, Marsico, "A cross-language perspective on speech
# information rate", Language 87 (2011). The bounds, and their slack, are ours.
MIN_SYLLABLES_PER_SECOND = 1.5
MAX_SYLLABLES_PER_SECOND = 12.0
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
        code: For programs; each at most once for a clip.
        message: For people: one sentence, with what to do about it.
    """

    code: str
    message: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The bounds at which one figure makes a clip fair or poor.

    Attributes:
        figure: Takes the figure out of the measures; None if it was not measured.
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
        if (value := self.figure(measures)) is None:
            return None
        is_beyond = operator.lt if self.high_is_good else operator.gt
        if not is_beyond(value, self.fair):
            return None
        is_poor = self.poor is not None and is_beyond(value, self.poor)
        message = self.message.format(value=value)
        return Reason(self.code, message, "poor" if is_poor else "fair")


NO_SPEECH = Reason(
    "no_speech",
    "It holds no speech; send a recording of one person who speaks.",
    "poor",
)

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
OF_ALL_CLIPS = ("little_speech",)


def reasons_of(measures: ClipMeasures) -> Iterator[Reason]:
    """The faults that the figures of a clip show."""
    if measures.speech_seconds == 0:
        yield NO_SPEECH
    for rule in RULES:
        if (reason := rule.reason(measures)) is not None:
            yield reason


detector = cache(SpeechDetector)  # the process's, which the first clip loads


def is_below(verdict: Verdict, wanted: Verdict) -> bool:
    """Tell whether a verdict is worse than another one."""
    order = get_args(Verdict)
    return order.index(verdict) > order.index(wanted)


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
        ref_text: Its transcript, if there is one; of several clips a line for each.
        model_problem: Why the model that is served does not take the clip, as
            `ClipLimits.problem` says it.
        warnings: The decoder's, if they are to be among the reasons.

    Raises: ConfigError: The detector is not installed.
    """
    measures = measure(audio, detector())
    reasons = [
        Reason(warning.code, warning.message, "fair")
        for warning in warnings
        if warning.code not in ("low_level", "clipping")  # which are measured here
    ]
    if (problem := model_problem) is not None:
        problem = f"{problem[:1].upper()}{problem[1:]}."
        reasons.insert(0, Reason("model_limits", problem, "poor"))
    if audio.num_clips == 1:
        reasons += _reasons_of_clip(measures, ref_text)
    else:
        reasons += _reasons_of_clips(audio, measures, ref_text)
    return ClipQuality(measures, worst(reasons), tuple(reasons))


def _reasons_of_clips(
    audio: ReferenceAudio, whole: ClipMeasures, ref_text: str | None
) -> Iterator[Reason]:
    yield from (reason for reason in reasons_of(whole) if reason.code in OF_ALL_CLIPS)
    texts = (ref_text or "").split("\n")
    clips = zip_longest(audio.clips(), texts[: audio.num_clips])
    for index, (clip, text) in enumerate(clips):
        for reason in _reasons_of_clip(measure(clip, detector()), text):
            if reason.code not in OF_ALL_CLIPS:
                yield replace(reason, message=f"{name_of(index)}: {reason.message}")


def _reasons_of_clip(measures: ClipMeasures, ref_text: str | None) -> Iterator[Reason]:
    yield from reasons_of(measures)
    seconds = measures.speech_seconds
    # A form sends an empty field for no transcript.
    if not (ref_text or "").strip() or seconds == 0:
        return
    if not is_plausible(ref_text or "", seconds):
        yield Reason(
            "transcript_mismatch",
            f"The transcript probably does not match the clip, which holds "
            f"{seconds:.1f} s of speech; write down all that is said in it, and "
            "nothing else.",
            "poor",
        )


def _rounded(decibels: float | None) -> float | None:
    return None if decibels is None else round(decibels, 1)


def is_plausible(text: str, speech_seconds: float) -> bool:
    """Tell whether a text can be spoken in so much speech, pauses left out."""
    # NFC composes the letters of Korean into syllables.
    syllables = sum(map(_syllables, unicodedata.normalize("NFC", text)))
    least = MIN_SYLLABLES_PER_SECOND * speech_seconds - _SLACK_SYLLABLES
    most = MAX_SYLLABLES_PER_SECOND * speech_seconds + _SLACK_SYLLABLES
    return least <= syllables <= most


def _syllables(char: str) -> float:
    code = ord(char)
    if any(first <= code <= last for first, last in _SYLLABIC):
        return 1.0
    if char.isdigit():
        return _PER_DIGIT
    return _PER_LETTER if char.isalpha() else 0.0
