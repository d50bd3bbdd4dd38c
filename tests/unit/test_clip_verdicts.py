"""What a check makes of figures, of clips nobody should send, and of transcripts."""

import json
from dataclasses import replace
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.audio_clips import sndfile_bytes
from tests.cli_runs import printed_by
from vllm_tts_cache.audio import speech_detector
from vllm_tts_cache.audio.decode import decode, decode_path
from vllm_tts_cache.audio.quality import (
    RULES,
    ClipMeasures,
    check_clip,
    is_plausible,
    reasons_of,
    worst,
)
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.testing.clips import SPEECH

RATES = (8_000, 8_001, 11_025, 22_050, 44_100, 48_000, 192_000, 384_000)
GOOD = ClipMeasures(
    duration_seconds=10.0,
    loudness_lufs=-20.0,
    peak_dbfs=-3.0,
    speech_seconds=9.0,
    longest_pause_seconds=0.5,
    noise_dbfs=-65.0,
    snr_db=45.0,
    bandwidth_hz=12_000,
)
# The figure that each rule looks at, as a field and in its bounds' unit.
FIELDS = {
    "little_speech": lambda v: {"speech_seconds": v, "duration_seconds": v},
    "much_silence": lambda v: {"duration_seconds": GOOD.speech_seconds / v},
    "long_pause": lambda v: {"longest_pause_seconds": v},
    "noisy": lambda v: {"snr_db": v},
    "clipped": lambda v: {"clipped_share": v},
    "quiet": lambda v: {"loudness_lufs": v},
    "loud": lambda v: {"loudness_lufs": v},
    "narrow_band": lambda v: {"bandwidth_hz": v},
}


def check(samples, rate):
    return check_clip(ReferenceAudio.of(np.asarray(samples, np.float32), rate))


@pytest.mark.parametrize(
    ("rule", "verdict", "bound"),
    [
        pytest.param(rule, verdict, bound, id=f"{rule.code}-{verdict}")
        for rule in RULES
        for verdict, bound in (("fair", rule.fair), ("poor", rule.poor))
        if bound is not None
    ],
)
def test_figure_beyond_a_bound_is_the_one_reason(rule, verdict, bound):
    away = -1e-6 if rule.high_is_good else 1e-6
    at_bound = replace(GOOD, **FIELDS[rule.code](bound))
    beyond = replace(GOOD, **FIELDS[rule.code](bound + away * abs(bound)))
    (reason,) = reasons_of(beyond)
    assert (reason.code, reason.verdict) == (rule.code, verdict)
    assert reason.message.endswith(".") and ". " not in reason.message
    assert worst((reason,)) == verdict
    better = "fair" if verdict == "poor" else "good"
    assert worst(tuple(reasons_of(at_bound))) == better


def row(rule):
    """The rule as docs/clip-quality.md has it."""
    side = "below" if rule.high_is_good else "above"
    bounds = [f"{side} {b:g}" if b is not None else "" for b in (rule.fair, rule.poor)]
    return f"| `{rule.code}` | {bounds[0]} | {bounds[1]} | {rule.source} |"


def test_the_bounds_are_those_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "clip-quality.md").read_text()
    assert "\n".join(map(row, RULES)) in page


def noise(rate, scale=0.1):
    return np.random.default_rng(0).normal(0, scale, 3 * rate)


@pytest.mark.parametrize("rate", (8_000, 44_100, 384_000))
@pytest.mark.parametrize(
    "make",
    [
        lambda rate: np.zeros(3 * rate),
        lambda rate: np.full(3 * rate, 0.5),
        noise,
        lambda rate: 0.5 * np.sin(2 * np.pi * 50 * np.arange(3 * rate) / rate),
        lambda rate: np.arange(3 * rate) % rate == 0,
        lambda rate: (
            0.5 * np.sign(np.sin(2 * np.pi * 440 * np.arange(3 * rate) / rate))
        ),
        lambda rate: noise(rate, 1e37),
        lambda rate: np.ones(1),
    ],
    ids=["silence", "constant", "noise", "hum", "clicks", "square", "huge", "1 sample"],
)
def test_what_is_no_speech_is_poor(make, rate):
    found = check(make(rate), rate)
    assert found.verdict == "poor"
    assert "no_speech" in {reason.code for reason in found.reasons}
    assert found.measures.snr_db is None


@given(
    st.sampled_from(RATES),
    hnp.arrays(
        np.float32,
        st.integers(1, 3_000),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    st.integers(1, 20),
)
@example(8_000, np.array([1e-45], np.float32), 1)
@example(48_000, np.array([3.4e38, -3.4e38], np.float32), 5_000)
@settings(max_examples=60)
def test_any_samples_give_finite_figures(rate, samples, times):
    found = check(np.tile(samples, times), rate)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["verdict"] in ("good", "fair", "poor")
    assert 0 <= plain["speech_share"] <= 1
    assert 0 <= plain["clipped_share"] <= 1
    assert plain["longest_pause_seconds"] <= plain["duration_seconds"] + 0.01


def test_what_a_file_has_lost_is_worth_a_thought():
    flac = SPEECH.path.read_bytes()
    for data, code in ((flac[:-20_000], "truncated"), (turned_over(), "one_channel")):
        decoded = decode(data)
        found = check_clip(decoded.audio, warnings=decoded.warnings)
        assert (found.reasons[0].code, found.reasons[0].verdict) == (code, "fair")
        assert found.reasons[0].message == decoded.warnings[0].message


def turned_over():
    audio = decode_path(SPEECH.path).audio
    stereo = np.stack([audio.samples, -audio.samples], axis=-1)
    return sndfile_bytes(stereo, audio.sample_rate_hz)


@pytest.mark.parametrize("text", ["Hi.", "...", SPEECH.transcript * 5])
def test_transcript_of_something_else_is_a_reason(text):
    audio = decode_path(SPEECH.path).audio
    found = check_clip(audio, ref_text=text)
    assert found.reasons[-1].code == "transcript_mismatch"
    assert found.verdict == "poor"


@pytest.mark.parametrize("text", [None, "", " \n", SPEECH.transcript])
def test_transcript_that_fits_or_is_none_is_no_reason(text):
    audio = decode_path(SPEECH.path).audio
    codes = [reason.code for reason in check_clip(audio, ref_text=text).reasons]
    assert codes == ["little_speech"]


# About how long people take to say each, pauses not counted.
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("The quick brown fox jumps over the lazy dog near the river bank.", 4.0),
        ("Donaudampfschifffahrtsgesellschaftskapitäne trinken gern Tee.", 4.5),
        ("El perro de San Roque no tiene rabo porque se lo han cortado.", 3.5),
        ("今天天气很好。我们一起去公园散步吧。", 3.5),
        ("東京特許許可局局長今日急遽休暇許可拒否。", 5.0),
        ("きょうはとてもいいてんきですね、さんぽにいきましょう。", 3.5),
        ("오늘은 날씨가 아주 좋아서 산책을 가고 싶습니다.", 3.5),
        ("Сегодня очень хорошая погода, пойдём гулять в парк.", 3.5),
        ("الطقس جميل جدا اليوم، هيا نذهب إلى الحديقة.", 3.5),
        ("आज मौसम बहुत अच्छा है, चलो पार्क में घूमने चलते हैं।", 3.5),
        ("วันนี้อากาศดีมาก ไปเดินเล่นที่สวนสาธารณะกันเถอะ", 3.5),
        ("Hôm nay thời tiết rất đẹp, chúng ta đi dạo công viên nhé.", 3.5),
        ("Call 555 0192 before 9.", 4.0),
        ("Yes.", 0.5),
    ],
)
def test_transcripts_in_any_script_are_plausible(text, seconds):
    assert is_plausible(text, seconds)
    assert is_plausible(text, seconds * 0.7)
    assert is_plausible(text, seconds * 1.4)
    if len(text) > 20:
        assert not is_plausible(text * 5, seconds)
        assert not is_plausible(text, seconds * 10)


def test_check_loads_neither_torch_nor_the_detectors_package():
    script = (
        "import sys; from vllm_tts_cache.audio.decode import decode_path; "
        "from vllm_tts_cache.audio.quality import check_clip; "
        "from vllm_tts_cache.testing.clips import SPEECH; "
        "print(check_clip(decode_path(SPEECH.path).audio).verdict); "
        "print(sorted({'torch', 'silero_vad'} & set(sys.modules)))"
    )
    assert printed_by(script).splitlines() == ["fair", "[]"]


def test_missing_detector_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(speech_detector, "_PACKAGE", "no_such_package_here")
    speech_detector.load_network.cache_clear()
    with pytest.raises(ConfigError, match="pip install 'silero-vad"):
        check_clip(decode_path(SPEECH.path).audio)
