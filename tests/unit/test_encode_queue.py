import itertools
import threading
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from tests.encoding_samples import INLINE, REGISTERED, make_key
from tests.waiting import Clock, wait_until
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.errors import EncodeError, EncodersChangedError
from vllm_tts_cache.model_executor.encode_queue import MAX_ASIDE_SECONDS, EncodeQueue
from vllm_tts_cache.model_executor.encode_work import EncodeClock, EncodeJob, KeyTurns
from vllm_tts_cache.speaker.wire import JobState, Want, WantCall

WAIT = 60.0
LEASE = 2.0
ENCODING = JobState.ENCODING
QUEUED: Any = "queued"  # what only a test asks
UNKNOWN: Any = "unknown"


class Work:
    """Encodes when the gate is open; what is named in ``errors`` raises."""

    def __init__(self, turns):
        self.turns = turns
        self.times = EncodeClock()
        self.names = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.errors = {}
        self.encoded = []
        self.kept = set()
        self.threads = set()
        self.rest = 0.0
        self.failed = {}

    def rest_seconds(self, encode_seconds):
        return self.rest

    def job_of(self, want):
        segment = Segment(want.segment)
        name = self.names[want.audio_sha256]
        return EncodeJob(
            key=make_key(name),
            encoder_name=name,
            flows={(want.tenant, segment)},
            segment=segment,
            is_urgent=want.urgent,
            is_forced=want.force,
        )

    def do(self, job, is_stuck):
        with self.turns.turn(job.key) as is_mine:
            if not (is_mine or is_stuck):
                return False
            name = job.encoder_name
            if job.is_forced or name not in self.kept:
                self.encode(name)
                self.kept.add(name)
                self.failed.pop(name, None)
        return True

    def encode(self, name):
        self.threads.add(threading.current_thread())
        self.entered.release()
        assert self.gate.wait(WAIT)
        if (error := self.errors.get(name)) is not None:
            raise error
        self.encoded.append(name)

    def note_failed(self, job, reason):
        self.failed[job.encoder_name] = JobState.FAILED, reason


class Report(NamedTuple):
    """What is told of a want, or of a job: a `WantReport` without the want's id."""

    state: JobState
    reason: str = ""
    encoding_seconds: float = 0.0


def reports_of(answer):
    return {
        each.id: Report(each.state, each.reason, each.encoding_seconds)
        for each in answer.reports
    }


class Rig:
    def __init__(self, directory):
        turns, self.other = (KeyTurns(directory / "turns.lock") for _ in range(2))
        self.work: Any = Work(turns)
        self.clock = Clock()
        self.numbers = itertools.count(100)
        options: Any = {"max_waiting_inline": 64, "clock": self.clock}
        self.queue = EncodeQueue(self.work, **options)
        self.elsewhere = ExitStack()  # what the other one has in hand

    def want(self, name="a", segment=REGISTERED, *, tenant="", client="client", **want):
        """Want it, under a new id if no number is given; what is said of it."""
        number = want.pop("number", None) or next(self.numbers)
        key = make_key(name)
        self.work.names[key.audio_sha256] = name
        what: Any = {"id": number, "fingerprint": key.encoder_fingerprint}
        what |= {"audio_sha256": key.audio_sha256, "tenant": tenant}
        what |= {"urgent": False, "force": False, **want}
        wanted = Want(segment=segment.value, **what)
        answer = self.queue.want(WantCall(client, [wanted], [], LEASE), 0)
        return reports_of(answer).get(number, Report(QUEUED))

    def look_at_one_elsewhere(self, segment=REGISTERED):
        """Another process has "a": it is wanted and looked at, and "b" is encoded."""
        assert self.elsewhere.enter_context(self.other.turn(make_key("a")))
        self.want("a", segment)
        self.want("b")
        wait_until(lambda: self.work.encoded == ["b"])

    def ask(self, *withdrawn, client="client", lease=LEASE):
        """What a client is told that wants nothing new."""
        answer = self.queue.want(WantCall(client, [], list(withdrawn), lease), 0)
        return answer.knew_client, reports_of(answer)

    def look(self, name="a"):
        key, running = make_key(name), self.queue._running
        if running is not None and running.key == key:
            return Report(ENCODING, "", self.clock() - running.began_at)
        if key in self.queue._line.jobs:
            return Report(QUEUED)
        return Report(*self.work.failed.get(name, (UNKNOWN,)))

    def hold(self, name="a", **how):
        """Have the thread in the middle of one encode."""
        self.work.gate.clear()
        self.want(name, **how)
        assert self.work.entered.acquire(timeout=WAIT)

    def run(self):
        self.work.gate.set()
        wait_until(lambda: not self.queue.stats()["in_flight"])


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.work.gate.set()
    rig.queue.close()
    rig.elsewhere.close()


def test_no_thread_starts_before_the_first_job_and_closing_ends_it(rig):
    before = threading.active_count()
    assert rig.look() == Report(UNKNOWN)
    assert threading.active_count() == before
    rig.want()
    rig.run()
    (thread,) = rig.work.threads
    assert thread.daemon
    assert thread is not threading.current_thread()
    rig.queue.close()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_wanting_does_not_wait_and_tells_how_far_a_key_is(rig):
    rig.hold("a")
    assert rig.want("b") == Report(QUEUED)
    rig.clock.now += 1.5
    assert rig.want("a") == Report(ENCODING, encoding_seconds=1.5)
    assert rig.look("a") == Report(ENCODING, encoding_seconds=1.5)
    assert rig.look("b") == Report(QUEUED)
    assert rig.queue.stats()["in_flight"] == 2
    assert rig.queue.stats()["waiting"] == {"registered": 1, "inline": 0}
    rig.run()
    assert rig.work.encoded == ["a", "b"]
    assert rig.queue.num_finished == 2


def test_behind_200_abandoned_inline_jobs_others_wait_for_the_one_in_hand(rig):
    rig.hold("in hand")
    told = [rig.want(f"inline {n}", INLINE).state for n in range(200)]
    assert told.count(JobState.REFUSED) == 200 - 64
    assert rig.queue.stats()["refused"] == 200 - 64
    assert rig.want("inline 0", INLINE) == Report(QUEUED), "it joins"
    assert {rig.want(f"bulk {n}").state for n in range(100)} == {QUEUED}
    assert rig.queue.stats()["waiting"] == {"registered": 100, "inline": 64}
    rig.clock.now += LEASE + 0.1  # their clients are gone
    rig.want("voice", client="later")
    assert rig.want("clip", INLINE, client="later") == Report(QUEUED), "there is room"
    rig.run()
    assert rig.work.encoded == ["in hand", "voice", "clip"]
    assert rig.queue.stats()["dropped"] == 164


def inline(name):
    return (name, INLINE, False)


def registered(name, *, urgent=False):
    return (name, REGISTERED, urgent)


# What is wanted, in turn -> the order in which it is encoded.
ORDERS = {
    "what requests wait for goes first, and voices and clips take turns": (
        [
            inline("clip 1"),
            registered("bulk 1"),
            registered("voice 1", urgent=True),
            inline("clip 2"),
            registered("voice 2", urgent=True),
            registered("bulk 2"),
        ],
        ["voice 1", "voice 2", "clip 1", "bulk 1", "clip 2", "bulk 2"],
    ),
    "a key waits once": ([registered("a"), registered("b"), registered("a")], "ab"),
    "who joins brings it forward": (
        [inline("b"), registered("c"), registered("a"), registered("a", urgent=True)],
        "abc",
    ),
    "and nobody takes it back": (
        [registered("b", urgent=True), registered("a", urgent=True), inline("b")],
        "ba",
    ),
    "an inline clip waits for one of many voices": (
        [*(registered(str(n), urgent=True) for n in range(6)), ("c", INLINE, True)],
        "0c12345",
    ),
    "the ninth that a request waits for waits for one that nobody waits for": (
        [registered("b"), *(registered(str(n), urgent=True) for n in range(9))],
        "01234567b8",
    ),
}


@pytest.mark.parametrize("wanted, encoded", ORDERS.values(), ids=ORDERS)
def test_jobs_are_encoded_in_turns(rig, wanted, encoded):
    rig.hold("in hand")
    for name, segment, urgent in wanted:
        rig.want(name, segment, urgent=urgent)
    rig.run()
    assert rig.work.encoded == ["in hand", *encoded]


@pytest.mark.parametrize("urgent", [False, True])
def test_a_tenant_waits_for_one_job_of_each_other(rig, urgent):
    """One inline reference waited behind all 150 voices that another had asked for."""
    rig.hold("in hand")
    for number in range(4):
        rig.want(f"acme {number}", tenant="acme", urgent=urgent)
        rig.want(f"clip {number}", INLINE, tenant="acme", urgent=urgent)
    rig.want("zenith 0", INLINE, tenant="zenith", urgent=urgent)
    rig.want("zenith 1", tenant="zenith", urgent=urgent)
    rig.run()
    order = ["acme 0", "zenith 0", "clip 0", "zenith 1", "acme 1"]
    assert rig.work.encoded[:6] == ["in hand", *order]


def test_what_two_tenants_want_is_encoded_in_the_first_ones_turn(rig):
    rig.hold("in hand")
    for name in ("a", "b", "shared"):
        rig.want(name, tenant="acme")
    rig.want("shared", tenant="zenith")
    rig.run()
    assert rig.work.encoded == ["in hand", "a", "shared", "b"]


def test_a_client_keeps_its_wants_by_one_lease(rig):
    rig.hold("in hand")
    rig.want("a", client="lives")
    rig.want("b", client="ends")
    rig.clock.now += LEASE - 0.1
    rig.ask(client="lives")
    rig.clock.now += LEASE - 0.1
    rig.run()
    assert rig.work.encoded == ["in hand", "a"]
    assert rig.ask(client="lives")[0] is True
    assert rig.ask(client="ends") == (False, {})


def test_a_failure_is_told_until_it_is_withdrawn_and_the_next_want_tries_again(rig):
    """An answer may be lost."""
    rig.work.errors["a"] = EncodeError("a cannot")
    rig.want(number=1)
    rig.run()
    failed = Report(JobState.FAILED, "a cannot")
    assert rig.look() == failed
    for _ in range(2):
        assert rig.ask() == (True, {1: failed})
        assert rig.want(number=1) == failed, "said again, it is the same want"
    assert rig.ask(1) == (True, {})
    assert rig.look() == failed
    rig.work.errors.clear()
    assert rig.want(number=2) == Report(QUEUED)
    rig.run()
    assert rig.work.encoded == ["a"]
    assert rig.ask() == (True, {2: Report(JobState.READY)})
    assert rig.look() == Report(UNKNOWN)


def test_what_its_last_client_withdraws_is_not_encoded(rig):
    rig.hold("in hand")
    rig.want("a", number=1)
    rig.want("b", number=2)
    rig.want("b", number=1, client="other")
    assert rig.ask(1, 2, 99) == (True, {100: rig.look("in hand")})
    assert rig.look("a") == Report(UNKNOWN)
    rig.run()
    assert rig.work.encoded == ["in hand", "b"]
    assert rig.ask(client="other") == (True, {1: Report(JobState.READY)})
    assert rig.queue.stats()["dropped"] == 1


def test_what_exists_already_is_not_encoded_unless_it_is_forced(rig):
    rig.want()
    rig.run()
    rig.want()
    rig.run()
    assert rig.work.encoded == ["a"]
    for _ in range(2):  # asking how far it is must not force it again
        rig.want(force=True, number=7)
        rig.run()
    assert rig.work.encoded == ["a", "a"]


def test_forcing_while_the_key_is_encoded_encodes_it_once_more(rig):
    rig.hold()
    assert rig.want(force=True, number=1) == Report(QUEUED)
    assert rig.want(force=True, number=1) == Report(QUEUED)
    assert rig.want(force=True, number=2) == Report(QUEUED)
    assert rig.want().state is ENCODING
    rig.run()
    assert rig.work.encoded == ["a", "a"]
    assert rig.ask()[1][1] == rig.ask()[1][2] == Report(JobState.READY)


def test_forcing_joins_an_encode_that_is_forced_already(rig):
    rig.hold(force=True)
    assert rig.want(force=True).state is ENCODING
    rig.run()
    assert rig.work.encoded == ["a"]


def test_deleting_an_audio_takes_its_jobs_and_names_the_one_in_hand(rig):
    rig.hold("a")
    rig.want("b")
    rig.want("c")
    shas = [make_key(name).audio_sha256 for name in "abx"]
    rig.want("b", number=7)
    assert rig.queue.delete(shas) == shas[:1]
    assert rig.ask()[1][7].state is JobState.NO_AUDIO, "who waits for it hears so"
    assert rig.look("b") == Report(UNKNOWN)
    rig.run()
    assert rig.work.encoded == ["a", "c"]
    assert rig.queue.delete(shas) == []


def test_encoders_that_were_loaded_anew_are_no_failure_of_the_clip(rig):
    rig.work.errors["a"] = EncodersChangedError()
    rig.want(number=1)
    rig.run()
    assert rig.ask()[1][1].state is JobState.NO_ENCODER
    assert rig.look() == Report(UNKNOWN)


def test_a_key_that_another_process_has_holds_nobody_up(rig):
    rig.look_at_one_elsewhere()
    assert rig.look("a").state in (QUEUED, ENCODING)
    rig.work.kept.add("a")  # the other process finished
    rig.elsewhere.close()
    rig.clock.now += 1.0
    rig.want("c")
    rig.run()
    assert rig.work.encoded == ["b", "c"]


def test_after_an_encode_that_no_request_waits_for_only_urgent_ones_begin(rig):
    rig.work.rest = LEASE / 2
    rig.hold("a")
    rig.want("b")
    rig.want("c", urgent=True)
    rig.work.gate.set()
    wait_until(lambda: rig.work.encoded == ["a", "c"])
    assert rig.look("b") == Report(QUEUED)
    rig.clock.now += LEASE / 2
    rig.ask()
    rig.run()
    assert rig.work.encoded == ["a", "c", "b"]


def test_what_another_process_has_is_removed_with_its_audio(rig):
    rig.look_at_one_elsewhere(INLINE)
    rig.want("a")
    rig.queue.delete([make_key("a").audio_sha256])
    assert rig.queue.stats()["waiting"] == {"registered": 0, "inline": 0}
    assert rig.look("a") == Report(UNKNOWN)


def test_a_key_that_another_process_never_finishes_is_encoded_after_all(rig):
    rig.look_at_one_elsewhere()
    rig.ask(lease=2 * MAX_ASIDE_SECONDS)
    rig.clock.now += MAX_ASIDE_SECONDS + 1
    rig.run()
    assert rig.work.encoded == ["b", "a"]


# -------- what else is done on the thread


def test_an_errand_is_run_on_the_thread_before_the_jobs_that_wait(rig):
    rig.hold("in hand")
    rig.want("a")
    done, order = [], rig.work.encoded

    def call():
        done.append(threading.current_thread())
        order.append("call")
        return 7

    caller = threading.Thread(target=lambda: done.append(rig.queue.call(call)))
    caller.start()
    wait_until(lambda: rig.queue._calls)
    rig.run()
    caller.join(WAIT)
    assert order == ["in hand", "call", "a"]
    assert done == [*rig.work.threads, 7]
    assert rig.queue.num_finished == 2, "an call is no job"


def failing(error):
    def act(*_):
        raise error

    return act


def test_an_errand_that_would_end_the_thread_does_not(rig):
    with pytest.raises(EncodeError, match="SystemExit"):
        rig.queue.call(failing(SystemExit()))
    assert rig.queue.call(lambda: 7) == 7
    rig.queue.close()
    with pytest.raises(EncodeError, match="thread is closed"):
        rig.queue.call(lambda: 7)


def test_closing_ends_the_wait_for_an_errand_behind_the_job_in_hand(rig):
    rig.hold()
    errors = []

    def call():
        try:
            rig.queue.call(lambda: 7)
        except EncodeError as exc:
            errors.append(str(exc))

    caller = threading.Thread(target=call)
    caller.start()
    wait_until(lambda: rig.queue._calls)
    closing = threading.Thread(target=rig.queue.close)
    closing.start()
    caller.join(WAIT)
    assert errors == ["the encode thread is closed"]
    rig.work.gate.set()
    closing.join(WAIT)


# -------- pausing


def test_a_paused_queue_ends_the_job_in_hand_and_begins_none(rig):
    rig.hold("in hand")
    rig.want("waiting")
    opener = threading.Timer(0.05, rig.work.gate.set)
    opener.start()
    assert rig.queue.pause("asleep", WAIT)
    assert rig.work.encoded == ["in hand"]
    assert rig.want("urgent", urgent=True) == Report(JobState.FAILED, "asleep")
    assert rig.want("new") == Report(QUEUED), "nobody waits for it"
    assert rig.queue.call(lambda: 7) == 7, "models are loaded meanwhile"
    assert rig.look("waiting") == Report(QUEUED)
    time.sleep(0.05)
    assert rig.work.encoded == ["in hand"]
    rig.queue.resume()
    assert rig.want("urgent", urgent=True) == Report(QUEUED)
    rig.run()
    assert set(rig.work.encoded) == {"in hand", "waiting", "new", "urgent"}


def test_what_nobody_wants_any_more_after_a_pause_is_dropped(rig):
    rig.queue.pause("asleep", WAIT)
    rig.queue.resume()
    rig.hold("in hand")
    rig.want("a")
    assert not rig.queue.pause("asleep", 0.01), "one is in hand"
    assert rig.want("in hand").state is ENCODING, "it may be waited for"
    rig.clock.now += LEASE + 0.1
    rig.queue.resume()
    rig.run()
    assert rig.work.encoded == ["in hand"]
    assert rig.queue.stats()["dropped"] == 1


# -------- the thread cannot die


@pytest.mark.parametrize("reason", ["a bug", "RuntimeError()"])
def test_whatever_raises_fails_its_job_only_with_a_reason(rig, reason):
    rig.work.errors["a"] = RuntimeError(*[reason] if reason == "a bug" else [])
    rig.want("a")
    rig.run()
    assert rig.look("a") == Report(JobState.FAILED, reason)
    rig.want("b")
    rig.run()
    assert rig.work.encoded == ["b"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_was_ended_leaves_no_key_behind_and_is_started_again(rig):
    rig.work.errors["a"] = SystemExit()
    rig.want("a")
    assert rig.work.entered.acquire(timeout=WAIT)
    (thread,) = rig.work.threads
    thread.join(WAIT)
    (report,) = rig.ask()[1].values()
    assert report == Report(JobState.FAILED, "the encode thread ended")
    rig.want("b")
    rig.run()
    assert rig.work.encoded == ["b"]
