import pytest

from tests.encoding_samples import INLINE, REGISTERED, make_key
from vllm_tts_cache.model_executor.encode_jobs import EncodeJob, WaitingLine
from vllm_tts_cache.speaker.lanes import Lane

FOREVER = 1e9


@pytest.fixture
def line():
    return WaitingLine(max_inline=3)


def job(name, segment=REGISTERED, *, urgent=False, until=FOREVER, force_id=""):
    return EncodeJob(
        key=make_key(name),
        encoder_name=str(name),
        segment=segment,
        lane=Lane.of(segment, urgent=urgent),
        wanted_until=until,
        force_ids={force_id} if force_id else set(),
    )


def names(line, now=0.0):
    popped = []
    while (job := line.pop(now)) is not None:
        popped.append(job.encoder_name)
    return popped


def test_urgent_goes_first_and_the_others_take_turns_first_come_first_served(line):
    for name, segment, urgent in (
        ("inline 1", INLINE, True),
        ("registered 1", REGISTERED, False),
        ("urgent 1", REGISTERED, True),
        ("inline 2", INLINE, False),
        ("urgent 2", REGISTERED, True),
        ("registered 2", REGISTERED, False),
    ):
        assert line.add(job(name, segment, urgent=urgent), now=0.0)
    assert names(line) == [
        *("urgent 1", "urgent 2"),
        *("registered 1", "inline 1", "registered 2", "inline 2"),
    ]


def test_neither_of_the_lanes_that_take_turns_holds_up_the_other(line):
    for number in range(4):
        line.add(job(f"voice {number}"), now=0.0)
    assert line.pop(0.0).encoder_name == "voice 0"
    for number in range(2):
        line.add(job(f"clip {number}", INLINE), now=0.0)
    found = [line.pop(0.0).encoder_name for _ in range(2)]
    line.add(job("clip 2", INLINE), now=0.0)
    assert [*found, *names(line)] == [
        *("clip 0", "voice 1", "clip 1", "voice 2"),
        *("clip 2", "voice 3"),
    ]


def test_a_key_waits_once_and_whoever_joins_can_only_bring_it_forward(line):
    line.add(job("b", INLINE), now=0.0)
    line.add(job("a", INLINE), now=0.0)
    line.add(job("a", urgent=True), now=0.0)
    line.add(job("a", INLINE), now=0.0)
    assert len(line) == 2
    assert line.get(make_key("a")).segment is REGISTERED
    assert names(line) == ["a", "b"]


def test_an_inline_clip_that_becomes_a_voice_is_one_that_a_request_waits_for(line):
    """Another server registers it: it is not to wait for a rest now."""
    line.add(job("clip", INLINE), now=0.0)
    line.add(job("clip"), now=0.0)
    assert line.pop(0.0, rest_seconds=3.0).lane is Lane.URGENT


def test_in_a_rest_only_that_is_begun_which_a_request_waits_for(line):
    line.add(job("voice"), now=0.0)
    assert line.pop(0.0, rest_seconds=3.0) is None
    assert line.seconds_until_next(0.0, rest_seconds=3.0) == 3.0
    line.add(job("clip", INLINE), now=0.0)
    assert line.seconds_until_next(0.0, rest_seconds=3.0) == 0.0
    assert line.pop(0.0, rest_seconds=3.0).encoder_name == "clip"
    assert line.pop(0.0).encoder_name == "voice"


def test_joining_keeps_the_place_renews_the_lease_and_adds_the_force(line):
    line.add(job("a", until=1.0, force_id="x"), now=0.0)
    line.add(job("b"), now=0.0)
    line.add(job("a", until=5.0, force_id="y"), now=0.0)
    line.add(job("a", until=2.0), now=0.0)
    popped = line.pop(now=4.0)
    assert (popped.encoder_name, popped.wanted_until) == ("a", 5.0)
    assert popped.force_ids == {"x", "y"}


def test_so_many_inline_jobs_wait_and_no_more_but_registered_ones_always_may(line):
    for number in range(3):
        assert line.add(job(number, INLINE), now=0.0)
    assert not line.add(job("one more", INLINE), now=0.0)
    assert line.add(job(0, INLINE), now=0.0), "it only joins"
    assert all(line.add(job(f"registered {n}"), now=0.0) for n in range(10))
    assert line.num_waiting(INLINE) == 3
    assert line.num_waiting(REGISTERED) == 10


def test_jobs_whose_lease_ran_out_make_room_are_never_popped_and_are_counted(line):
    for number in range(3):
        line.add(job(number, INLINE, until=1.0), now=0.0)
    assert line.add(job("new", INLINE, until=9.0), now=2.0)
    assert line.num_dropped == 3
    assert names(line, now=2.0) == ["new"]
    line.add(job("left", until=3.0), now=2.0)
    assert line.pop(now=4.0) is None
    assert line.num_dropped == 4


def test_a_job_put_back_waits_at_the_front_without_holding_up_the_others(line):
    line.add(job("a"), now=0.0)
    line.add(job("b"), now=0.0)
    aside = line.pop(now=0.0)
    aside.not_before = 1.0
    line.put_back(aside)
    assert line.pop(now=0.5).encoder_name == "b"
    assert line.pop(now=0.5) is None
    assert line.seconds_until_next(now=0.5) == pytest.approx(0.5)
    assert line.pop(now=1.0) is aside
    assert line.seconds_until_next(now=1.0) is None


def test_a_job_put_back_joins_what_was_wanted_meanwhile(line):
    line.add(job("a"), now=0.0)
    aside = line.pop(now=0.0)
    line.add(job("a", force_id="x"), now=0.0)
    line.put_back(aside)
    assert len(line) == 1
    assert line.pop(now=0.0).force_ids == {"x"}


def test_a_job_put_back_takes_what_was_wanted_meanwhile_to_its_lane(line):
    """It stayed in the other one, where nothing could remove it any more."""
    line.add(job("a", INLINE), now=0.0)
    aside = line.pop(now=0.0)
    line.add(job("a"), now=0.0)
    line.put_back(aside)
    line.remove({aside.key.audio_sha256})
    assert len(line) == 0


def test_removing_an_audio_removes_its_jobs_of_every_lane_and_no_others(line):
    for name, segment, urgent in (
        ("a", INLINE, False),
        ("b", REGISTERED, False),
        ("c", REGISTERED, True),
        ("d", REGISTERED, False),
    ):
        line.add(job(name, segment, urgent=urgent), now=0.0)
    gone = {make_key(name).audio_sha256 for name in "abc"}
    line.remove(gone)
    assert names(line) == ["d"]
