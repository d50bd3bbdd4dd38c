"""A reference by content address gives the host's own rows, bit for bit.

On the real talkers of the families whose prompts say at which rows a reference stands.
The host's side of each, and how it is asked for the rows of a step, is `Bench`, in
``voices.py`` of its folder.
"""

from importlib import import_module

import pytest
import torch

from tests.families.cases import cloning_cases, of
from tests.families.runner import UNKNOWN, UNNAMED, num_failed
from vllm_tts_cache.families.networks.prompts import ROWS

NAMES = ("audio8_tts", "fish_speech", "higgs_audio_v2", "higgs_audio_v3")
pytestmark = of(case for case in cloning_cases() if case.name in NAMES)


@pytest.fixture(scope="module")
def bench(own_case, own_checkpoint, talker):
    part = import_module(f"tests.families.{own_case.name}.voices")
    return part.Bench(talker, own_checkpoint)


@pytest.fixture(autouse=True)
def nothing_failed_before(talker):
    talker._failed_requests._ids.clear()
    talker._suspect_prefixes._prefixes.clear()
    talker._suspect_prefixes.end_step()


@pytest.fixture(scope="module")
def voice(bench):
    return bench.voice()


def failed(talker):
    return set(talker._failed_requests._ids)


def step(bench, *requests):
    """The rows of a step: of names, voices, where spans begin and end, and infos."""
    rows = bench.rows(requests)
    bench.talker._suspect_prefixes.end_step()
    return rows


def prefill(bench, voice, *, chunk=None, start=0, name="one", **changed):
    info, parts = {**voice.info, **changed}, []
    while start < len(voice.ids):
        end = min(start + (chunk or len(voice.ids)), len(voice.ids))
        parts += step(bench, (name, voice, start, end, info))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [None, 1, 7, 16, 64, -1])
def test_a_prefill_is_the_hosts(bench, talker, voice, chunk):
    """Stock passes over a chunk, which has too few places for all codes."""
    before = talker.tts_cache_speakers.stats().prompts
    if chunk == -1:
        chunk = len(voice.ids) - 1  # a last one of one token is still prefill
    ours = prefill(bench, voice, chunk=chunk)
    assert ours.dtype == torch.bfloat16
    for hosts in bench.hosts(voice):
        assert torch.equal(ours, hosts)
    assert talker.tts_cache_speakers.stats().prompts == before + 1


@pytest.mark.parametrize("offset", [-1, 0, 1, 32, 69])
def test_after_a_hit_only_the_rest_is_given(bench, voice, offset):
    start = voice.where.start + offset
    ours = prefill(bench, voice, start=start)
    assert torch.equal(ours, bench.hosts(voice)[0][start:])


def test_requests_of_one_step_keep_their_voices(bench, voice):
    both = (voice, bench.voice(1))
    made = step(
        bench, *((f"{n}", v, 0, len(v.ids), dict(v.info)) for n, v in enumerate(both))
    )
    for rows, each in zip(made, both, strict=True):
        assert torch.equal(rows, bench.hosts(each)[0])


@pytest.mark.parametrize("chunk", [None, 1, 16])
def test_a_request_without_a_voice_is_left_to_the_host(bench, chunk):
    plain, expected = bench.plain()
    assert torch.equal(prefill(bench, plain, chunk=chunk), expected)


WRONG = {
    "unknown": UNKNOWN,
    "no address": UNNAMED["no-address"],
    "nowhere": {ROWS: None},
    "negative": {ROWS: [-1, 70, 0]},
    "text": {ROWS: "0"},
    "of another length": {ROWS: [1, 5, 0]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("chunk", [None, 16])
def test_one_request_fails_alone(bench, talker, voice, wrong, chunk):
    before, end = num_failed(talker), len(voice.ids)
    if chunk is None:
        wronged = ("one", voice, 0, end, {**voice.info, **wrong})
        _, rows = step(bench, wronged, ("other", voice, 0, end, dict(voice.info)))
        assert torch.equal(rows, bench.hosts(voice)[0])
    else:
        prefill(bench, voice, chunk=chunk, **wrong)
    assert num_failed(talker) == before + 1
    assert failed(talker) == {"one"}
    assert bench.ended("other", "one", "third") == ["one"]


MISFITS = {
    "a row less": lambda codes: codes[:-1],
    "a codebook less": lambda codes: codes[:, :-1],
    "negative": lambda codes: codes - 4_096,
    "past the codebook": lambda codes: codes + 4_096,
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_codes_that_do_not_fit_the_prompt_fail_their_request(bench, talker, change):
    voice = bench.voice(2)
    voice.remember(codec={"codes": change(voice.codes)})
    prefill(bench, voice)
    assert failed(talker) == {"one"}
    voice.remember(codec={"codes": voice.codes})


def test_a_span_beside_the_reference_asks_for_no_encoding(bench, talker):
    voice = bench.voice(3)
    (expected, *_), start = bench.hosts(voice), voice.where.start
    voice.speakers.delete([voice.ref.audio_sha256])
    (before,) = step(bench, ("before", voice, 0, start, dict(voice.info)))
    assert torch.equal(before, expected[:start])
    (rows,) = step(bench, behind(voice, "behind"))
    assert torch.equal(rows, expected[start + voice.where.num_rows :])
    assert not failed(talker)


def behind(voice, name):
    """What is asked after a hit in the KV that covers the whole reference."""
    start = voice.where.start + voice.where.num_rows
    return name, voice, start, len(voice.ids), dict(voice.info)


def failing(voice, name="failing"):
    where = voice.where
    short = [where.start, where.num_rows - 1, where.checksum]
    return name, voice, 0, len(voice.ids), {**voice.info, ROWS: short}


def test_a_prefix_that_may_be_of_a_failure_is_not_spoken_with(bench, talker, voice):
    """Scheduled before the scheduler dropped it: without this, nobody's voice."""
    step(bench, behind(voice, "found it whole"))
    step(bench, behind(voice, "before"), failing(voice), behind(voice, "after"))
    step(bench, behind(voice, "late"))
    prefill(bench, voice, name="computes it")
    step(bench, behind(voice, "finds it"))
    assert failed(talker) == {"before", "failing", "after", "late"}


def test_a_prefix_is_suspect_with_its_transcript_alone(bench, talker, voice):
    """Another transcript has other KV, under a salt of its own: both ways."""
    other = bench.voice(spoken="Other words, and more of them.")
    assert other.ref == voice.ref and other.where != voice.where
    step(bench, failing(voice))
    step(bench, behind(other, "of the other"))
    prefill(bench, other, name="whole other")
    step(bench, behind(voice, "late"))
    assert failed(talker) == {"failing", "late"}


def test_what_fails_behind_codes_is_suspect(bench, talker, voice, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(*bench.takes_room, full)
        prefill(bench, voice, name="lacks room")
    step(bench, behind(voice, "late"))
    assert failed(talker) == {"lacks room", "late"}
