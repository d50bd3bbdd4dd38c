"""What a reference clip is worth, before anybody clones it.

A check says, and never refuses: what may be registered is for `audio.limits` and for
the model to say.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from vllm_tts_cache.audio.clips import name_of
from vllm_tts_cache.audio.quality.measures import ClipMeasures, measure
from vllm_tts_cache.audio.quality.rules import (
    OF_ALL_CLIPS,
    Reason,
    Verdict,
    reasons_of,
    worst,
)
from vllm_tts_cache.audio.quality.speech import SpeechDetector
from vllm_tts_cache.audio.quality.transcript import is_plausible
from vllm_tts_cache.audio.reference import ReferenceAudio


@dataclass(frozen=True, slots=True)
class ClipQuality:
    """What was measured of a clip, and what it comes to.

    Attributes:
        verdict: ``poor`` is worth another recording, ``fair`` worth a thought.
        reasons: All that speaks against it; none if it is good.
    """

    measures: ClipMeasures
    verdict: Verdict
    reasons: tuple[Reason, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, rounded; None is what could not be measured."""
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


class ClipChecker:
    """Checks clips; safe in any thread, and to be kept off an event loop.

    The detector is loaded with the first clip: a server that checks none needs none.
    """

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self._detector: SpeechDetector | None = None

    def check(
        self,
        audio: ReferenceAudio,
        *,
        ref_text: str | None = None,
        model_problem: str | None = None,
    ) -> ClipQuality:
        """Measure a clip and say what it is worth.

        Of several clips the figures, and whether there is speech enough, are those of
        all together; what else there is to say names its clip.

        Args:
            audio: As it was decoded, at its own rate.
            ref_text: What is said in it, if anybody knows; of several clips a line
                for each.
            model_problem: Why the model that is served does not take it, as
                `ClipLimits.problem` says it.

        Raises:
            ConfigError: The detector is not installed.
        """
        detector = self._loaded()
        measures = measure(audio, detector)
        said: Iterator[Reason] = _of_clip(measures, ref_text)
        if audio.num_clips > 1:
            said = _of_clips(audio, measures, ref_text, detector)
        reasons = (*_from_model(model_problem), *said)
        return ClipQuality(measures, worst(reasons), reasons)

    def _loaded(self) -> SpeechDetector:
        with self._loading:
            if self._detector is None:
                self._detector = SpeechDetector()
            return self._detector


def _of_clip(measures: ClipMeasures, ref_text: str | None) -> Iterator[Reason]:
    yield from reasons_of(measures)
    yield from _from_transcript(ref_text, measures.speech_seconds)


def _of_clips(
    audio: ReferenceAudio,
    whole: ClipMeasures,
    ref_text: str | None,
    detector: SpeechDetector,
) -> Iterator[Reason]:
    yield from (reason for reason in reasons_of(whole) if reason.code in OF_ALL_CLIPS)
    texts = (ref_text or "").split("\n")
    clips = zip_longest(audio.clips(), texts[: audio.num_clips])
    for index, (clip, text) in enumerate(clips):
        for reason in _of_clip(measure(clip, detector), text):
            if reason.code not in OF_ALL_CLIPS:
                message = f"{name_of(index)}: {reason.message}"
                yield replace(reason, message=message)


def _from_model(problem: str | None) -> Iterator[Reason]:
    if problem is not None:
        yield Reason("model_limits", f"{problem[:1].upper()}{problem[1:]}.", "poor")


def _from_transcript(ref_text: str | None, speech_seconds: float) -> Iterator[Reason]:
    # A form sends an empty field for none.
    if ref_text is None or not ref_text.strip() or speech_seconds == 0:
        return
    if not is_plausible(ref_text, speech_seconds):
        yield Reason(
            "transcript_mismatch",
            f"The transcript probably does not match the clip, which holds "
            f"{speech_seconds:.1f} s of speech; write down all that is said in it, and "
            "nothing else.",
            "poor",
        )


def _rounded(decibels: float | None) -> float | None:
    return None if decibels is None else round(decibels, 1)
