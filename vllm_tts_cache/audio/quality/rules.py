"""Where a figure of a clip is good, fair or poor, who says so, and what to do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from vllm_tts_cache.audio.limits import LOW_LEVEL_DBFS, MAX_CLIPPED_SHARE
from vllm_tts_cache.audio.quality.measures import ClipMeasures

Verdict = Literal["good", "fair", "poor"]


@dataclass(frozen=True, slots=True)
class Reason:
    """Something about a clip that a clone of it will suffer from.

    Attributes:
        code: For programs; each at most once for a clip.
        message: For people: one sentence, what is the matter and what to do.
        verdict: How bad it is.
    """

    code: str
    message: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one figure means.

    Attributes:
        figure: What it looks at; None where it was not measured.
        fair: From here on, away from good, it is worth a word. The bound is good.
        poor: From here on it is worth another recording; None if it never is.
        high_is_good: Whether good lies above.
        message: With the figure as ``value`` in the unit of the bounds.
        source: Where the bounds are from.
    """

    code: str
    figure: Callable[[ClipMeasures], float | None]
    fair: float
    poor: float | None
    high_is_good: bool
    message: str
    source: str

    def reason(self, measures: ClipMeasures) -> Reason | None:
        """Say what is wrong with the figure, or None."""
        value = self.figure(measures)
        if value is None or not self._beyond(value, self.fair):
            return None
        is_poor = self.poor is not None and self._beyond(value, self.poor)
        message = self.message.format(value=value)
        return Reason(self.code, message, "poor" if is_poor else "fair")

    def _beyond(self, value: float, bound: float) -> bool:
        return value < bound if self.high_is_good else value > bound


NO_SPEECH = Reason(
    "no_speech",
    "Nobody is heard speaking in it; send a recording of one person who speaks.",
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

# What has no speech in it is told so, and nothing that follows from it.
RULES = (
    Rule(
        code="little_speech",
        figure=lambda m: m.speech_seconds or None,
        fair=5.0,
        poor=3.0,
        high_is_good=True,
        message="It holds {value:.1f} s of speech; record 5 to 15 s.",
        source=f"5 to 15 s ({_INWORLD}); 3 s are required ({_ALIBABA})",
    ),
    Rule(
        code="much_silence",
        figure=lambda m: m.speech_share or None,
        fair=0.5,
        poor=0.25,
        high_is_good=True,
        message="Somebody speaks in only {value:.0%} of it; cut the silence off.",
        source="ours",
    ),
    Rule(
        code="long_pause",
        figure=lambda m: m.longest_pause_seconds,
        fair=2.0,
        poor=None,
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
        high_is_good=True,
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
        high_is_good=True,
        message="It is quiet ({value:.0f} LUFS); record at about -20 LUFS.",
        source=f"-23 to -18 dB RMS ({_ELEVENLABS}); 10 dB of leave, and poor, are ours",
    ),
    Rule(
        code="loud",
        figure=lambda m: m.loudness_lufs,
        fair=-10.0,
        poor=None,
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
        high_is_good=True,
        message="It holds nothing above {value:.0f} Hz, whatever its sample rate; "
        "record at 24 kHz or more, and not over a telephone.",
        source=f"sampled at 16 kHz at least, better at 24 kHz ({_AZURE}), less what "
        "filters take; telephones end at 3.4 kHz",
    ),
)


# What several clips have enough of together, or not.
OF_ALL_CLIPS = ("little_speech",)


def reasons_of(measures: ClipMeasures) -> Iterator[Reason]:
    """What the figures of a clip say against it."""
    if measures.speech_seconds == 0:
        yield NO_SPEECH
    for rule in RULES:
        if (reason := rule.reason(measures)) is not None:
            yield reason


def is_below(verdict: Verdict, wanted: Verdict) -> bool:
    """Whether a verdict is worse than another one."""
    order = get_args(Verdict)
    return order.index(verdict) > order.index(wanted)


def worst(reasons: tuple[Reason, ...]) -> Verdict:
    """What all reasons together come to."""
    found = {reason.verdict for reason in reasons}
    return "poor" if "poor" in found else "fair" if "fair" in found else "good"
