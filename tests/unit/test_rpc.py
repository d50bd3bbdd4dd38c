import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from tests.in_process_workers import (
    METHODS,
    InProcessEngine,
    SpectrumEncoder,
    SyncInProcessEngine,
    clip,
    worker,
    worker_speakers,
    worker_with,
)
from vllm_tts_cache.errors import EncodeError, WorkerRPCError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor.decoder_states import DecoderState, DecoderStates
from vllm_tts_cache.speaker import rpc_client, wire
from vllm_tts_cache.speaker.rpc_client import (
    DECODER_STATS,
    DELETE,
    DELETE_STATES,
    DESCRIBE,
    ENCODING,
    FAILED,
    MAX_CALLS,
    STATS,
    WANT,
    AsyncWorkers,
    ForeignStoreError,
    SyncWorkers,
    UnsupportedModelError,
    checked_answers,
    encoding_of,
    refuse_elsewhere,
)
from vllm_tts_cache.store.binding import StoreId
from vllm_tts_cache.store.encoding import EncodingKey

SHA = clip().audio_sha256
FINGERPRINT = SpectrumEncoder("speaker").fingerprint
OURS = wire.encode(wire.Described(rank=0, fingerprints={"codec": "f"}))
DEAD = {"supported": False, "error": "stage 0 replica 1 is not attached"}
CALLS = {
    DESCRIBE: wire.DescribeCall(b"secret"),
    WANT: wire.WantCall("client", [], [], 1.0),
    ENCODING: wire.EncodingCall(SHA, FINGERPRINT),
    DELETE: wire.DeleteCall(audio_sha256s=[SHA]),
    FAILED: wire.FailedCall(request_ids=["x"]),
    STATS: None,
}
OF_DECODERS = {DELETE_STATES: wire.DeleteCall(audio_sha256s=[SHA]), DECODER_STATS: None}
EVERY_METHOD = pytest.mark.parametrize(
    ("method", "request_"), CALLS.items(), ids=lambda value: getattr(value, "name", "")
)


@pytest.fixture
def speakers(tmp_path):
    speakers = worker_speakers(tmp_path, [SpectrumEncoder("speaker")])
    yield speakers
    speakers.close()


@pytest.fixture
def workers(speakers):
    return SyncWorkers(SyncInProcessEngine(worker_with(speakers)))


# -------- what a caller makes of an answer


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ([], "no worker answered"),
        ([[]], "no worker answered"),
        ([{"supported": False, "error": "KeyError('x')"}], r"KeyError\('x'\)"),
        ([{"supported": False, "todo": "diffusion stage"}], "diffusion stage"),
        ([{"supported": False}], ".*supported"),
        ([None], "a worker answered None"),
        (["lost"], "a worker answered 'lost'"),
        ([[None]], "a worker answered None"),
        ([[OURS, "lost"]], "a worker answered 'lost'"),
        ([[{"supported": False, "error": "Boom"}]], "Boom"),
        ([[OURS, {"supported": False, "todo": "later"}]], "later"),
        ([[b"\xff"]], "not the bytes of Described"),
        ([[wire.encode(wire.FailedPrompts(causes={}))]], "not the bytes of Described"),
        ([[wire.encode(wire.Failed(reason="a bug"))]], "a bug"),
        ([DEAD, None], "stage 0 replica 1 is not attached"),
    ],
)
def test_what_is_no_answer_is_an_error_with_method_and_reason(results, reason):
    with pytest.raises(WorkerRPCError, match=f"^tts_cache_describe: {reason}"):
        checked_answers(DESCRIBE, results)


def test_where_there_is_no_replica_nobody_has_to_delete():
    assert checked_answers(DELETE, []) == []
    with pytest.raises(WorkerRPCError, match="no worker answered"):
        checked_answers(DELETE, [[]])


def test_a_worker_without_a_speaker_side_is_an_error_of_its_own():
    answer = wire.encode(wire.Unsupported(reason="Bark clones no voices"))
    with pytest.raises(UnsupportedModelError, match="describe: Bark clones no voices"):
        checked_answers(DESCRIBE, [[OURS, answer]])


SILENT = [
    DEAD,
    None,
    [wire.encode(wire.Unsupported(reason="no encoders"))],
    [OURS, wire.encode(wire.Failed(reason="a rank of it fell over"))],
]


@pytest.mark.parametrize("silent", SILENT, ids=["dead", "none", "unsupported", "rank"])
def test_live_replicas_answer_for_one_that_does_not(silent, plugin_log, monkeypatch):
    throttled = ThrottledLog()
    monkeypatch.setattr(rpc_client, "throttled", throttled)
    for results in ([[OURS], silent, [OURS]], [silent, [OURS]]):
        answers = checked_answers(DESCRIBE, results)
        assert [answer.rank for answer in answers] == [0] * (len(results) - 1)
    first, second = (record.getMessage() for record in plugin_log.records)
    assert first.startswith("Replica 1 of 3 does not answer; the others do: tts_cache_")
    assert second.startswith("Replica 0 of 2 does not answer")
    for _ in range(50):
        checked_answers(DESCRIBE, [[OURS], silent])
    assert len(plugin_log.records) == 2


def test_a_deletion_is_not_confirmed_while_a_replica_may_remember():
    deleted = wire.encode(wire.Deleted(num_entries=1, busy=[]))
    assert len(checked_answers(DELETE, [[deleted], [deleted]])) == 2
    with pytest.raises(WorkerRPCError, match=r"tts_cache_delete: .*not attached"):
        checked_answers(DELETE, [[deleted], DEAD])


def unreachable(call) -> Any:
    return SimpleNamespace(errored=False, collective_rpc=call)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), r"TimeoutError\(\)"),
        (RuntimeError("the engine is gone"), "the engine is gone"),
    ],
)
async def test_an_engine_that_cannot_be_reached_is_an_error_of_ours(error, reason):
    with pytest.raises(WorkerRPCError, match=f"^tts_cache_stats: {reason}"):
        await AsyncWorkers(unreachable(AsyncMock(side_effect=error))).call(STATS)
    with pytest.raises(WorkerRPCError, match=f"^tts_cache_stats: {reason}"):
        SyncWorkers(unreachable(Mock(side_effect=error))).call(STATS)


class BusyEngine:
    errored = False

    def __init__(self):
        self.running = self.most = 0

    async def collective_rpc(self, *args, **kwargs):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.05)
        self.running -= 1
        raise RuntimeError("it is too busy")


async def test_a_call_keeps_its_turn_although_its_caller_has_left():
    """The host's thread waits on, and it has few of them."""
    workers = AsyncWorkers(engine := BusyEngine())
    for _ in range(5):
        call = workers.call(ENCODING, CALLS[ENCODING])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.005)
    assert engine.running == engine.most == MAX_CALLS
    with pytest.raises(WorkerRPCError, match="too busy"):
        await workers.call(ENCODING, CALLS[ENCODING])
    assert engine.most == MAX_CALLS


class SlowEngine(InProcessEngine):
    """Answers when it is let; what it was asked by then is in ``calls``."""

    def __init__(self, *workers):
        super().__init__(*workers)
        self.is_idle = asyncio.Event()

    async def collective_rpc(self, method, args=(), **_):  # pyright: ignore
        answers = self.called(method, args)
        await self.is_idle.wait()
        return answers


async def asked_at_once(*calls):
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0.01)
    return tasks


async def test_who_asks_at_once_shares_an_answer_that_no_later_one_has(speakers):
    stats = replace(STATS, seconds_between=0.0)
    workers = AsyncWorkers(engine := SlowEngine(worker_with(speakers)))
    first = await asked_at_once(*(workers.call(stats) for _ in range(10)))
    assert len(engine.calls) == 1
    later = await asked_at_once(*(workers.call(stats) for _ in range(10)))
    assert len(engine.calls) == 2
    last = await asked_at_once(*(workers.call(stats) for _ in range(10)))
    assert len(engine.calls) == MAX_CALLS == 2
    engine.is_idle.set()
    answers = await asyncio.gather(*first, *later, *last)
    told = [answer.stats.rpc_calls[STATS.name] for (answer,) in answers]
    assert told == [1] * 10 + [2] * 10 + [3] * 10


async def test_counters_that_are_always_asked_for_cost_two_calls_a_second(speakers):
    """The next call began when the last one was answered, as long as anybody asked."""
    workers = AsyncWorkers(engine := InProcessEngine(worker_with(speakers)))
    began, told = time.monotonic(), []
    while time.monotonic() - began < 1.2:
        (answer,) = await workers.call(STATS)
        told.append(answer.stats.rpc_calls[STATS.name])
    assert len(engine.calls) <= 2 + 2 * (time.monotonic() - began)
    assert told == list(range(1, len(told) + 1))  # each is of its own time


async def test_who_leaves_takes_the_answer_from_nobody(speakers):
    workers = AsyncWorkers(engine := SlowEngine(worker_with(speakers)))
    first, *others = await asked_at_once(*(workers.call(STATS) for _ in range(3)))
    first.cancel()
    engine.is_idle.set()
    assert all(await asyncio.gather(*others))
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_call_that_fails_fails_for_all_who_share_it_and_for_no_later_one():
    workers = AsyncWorkers(engine := BusyEngine())
    tasks = await asked_at_once(*(workers.call(STATS) for _ in range(3)))
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, WorkerRPCError)
    assert engine.most == 1
    with pytest.raises(WorkerRPCError, match="too busy"):
        await workers.call(STATS)


async def test_causes_of_failures_are_asked_for_together(speakers):
    for number, suffix in enumerate(("", "-01234567", "")):  # the host's, or none
        speakers.remember_failed_prompt(f"speech-{number}{suffix}", f"cause {number}")
    workers = AsyncWorkers(engine := InProcessEngine(worker_with(speakers)))
    calls = [wire.FailedCall(request_ids=[f"speech-{number}"]) for number in range(4)]
    asked = [workers.call(FAILED, call) for call in calls]
    answers = await asyncio.gather(*asked)
    assert engine.calls == [FAILED.name]
    expected = {f"speech-{number}": f"cause {number}" for number in range(3)}
    assert [answer.causes for (answer,) in answers] == [expected] * 4


def described(store_id, place="node-b:/voices"):
    return wire.Described(rank=3, fingerprints={}, store_id=store_id, store_place=place)


def test_a_worker_that_reads_another_directory_is_refused_by_name():
    home = StoreId(id="1", place="node-a:/home/me/voices")
    refuse_elsewhere([described("1"), described("1", "node-b:/mnt/voices")], home)
    with pytest.raises(ForeignStoreError) as refused:
        refuse_elsewhere([described("1"), described("2")], home)
    for told in ("rank 3", home.place, "node-b:/voices", "SPEAKER_SAMPLES_DIR"):
        assert told in str(refused.value)
    # Without an id a directory is taken for the same.
    refuse_elsewhere([described("")], home)
    refuse_elsewhere([described("1")], StoreId(place="here"))


def test_an_encoding_that_no_worker_has_or_that_is_damaged_is_an_error():
    key = EncodingKey(audio_sha256=SHA, encoder_fingerprint="0" * 64)
    with pytest.raises(EncodeError, match="not there any more"):
        encoding_of([wire.EncodingAnswer(encoding=None)], key)
    with pytest.raises(EncodeError, match="corrupt"):
        encoding_of([wire.EncodingAnswer(encoding=b"damaged")], key)


# -------- what the workers answer


def test_a_decoder_tells_and_deletes_what_it_keeps():
    states = DecoderStates(max_bytes=100)
    states.get(SHA, "d", lambda: DecoderState("state", 40))
    model = SimpleNamespace(tts_cache_decoder_states=states)
    workers = SyncWorkers(SyncInProcessEngine(worker(model)))
    (told,) = workers.call(DECODER_STATS)
    assert (told.states, told.bytes, told.max_bytes, told.made) == (1, 40, 100, 1)
    assert "worker_id" not in told.shown
    everything = wire.DeleteCall(audio_sha256s=[], everything=True)
    for call in (OF_DECODERS[DELETE_STATES], everything):
        states.get("b" * 64, "d", lambda: DecoderState("state", 40))
        (deleted,) = workers.call(DELETE_STATES, call)
        assert (deleted.num_entries, deleted.busy) == (1, [])


@EVERY_METHOD
async def test_every_method_answers_all_and_is_counted(speakers, method, request_):
    engine = InProcessEngine(worker_with(speakers), worker_with(speakers, rank=1))
    answers = await AsyncWorkers(engine).call(method, request_)
    assert [type(answer) for answer in answers] == [method.answer] * 2
    engine = SyncInProcessEngine(worker_with(speakers))
    assert type(SyncWorkers(engine).call(method, request_)[0]) is method.answer
    assert speakers.stats().rpc_calls == {method.name: 3}


def test_every_method_says_which_model_has_no_side_for_it():
    class CodecDecoder:
        pass

    calls = CALLS | OF_DECODERS
    assert {method.name for method in calls} == METHODS.keys()
    for model, name in ((CodecDecoder(), "CodecDecoder"), (None, "NoneType")):
        workers = SyncWorkers(SyncInProcessEngine(worker(model)))
        for method, request_ in calls.items():
            with pytest.raises(UnsupportedModelError, match=f"{method.name}: {name} "):
                workers.call(method, request_)


@EVERY_METHOD
def test_no_method_raises_whatever_it_is_called_with(speakers, method, request_):
    """The host would make a value of an exception, in a form of its own."""
    for call in ((b"\xff",), (b"",), ("text",), (None,), (b"\x80", b"\x80")):
        answer = METHODS[method.name](worker_with(speakers), *call)
        found = msgspec.msgpack.decode(answer, type=wire.Failed)
        assert found.reason


def test_a_bug_in_the_speaker_side_is_told_and_not_raised(speakers, monkeypatch):
    monkeypatch.setattr(type(speakers), "stats", lambda self: 1 / 0)
    workers = SyncWorkers(SyncInProcessEngine(worker_with(speakers)))
    with pytest.raises(WorkerRPCError, match="tts_cache_stats: division by zero"):
        workers.call(STATS)
