import asyncio
import sys
import time
from unittest.mock import AsyncMock

import pytest

from tests.encoding_samples import make_key, sized_encoding
from tests.in_process_workers import (
    InProcessEngine,
    SpectrumEncoder,
    clip,
    order_of,
    ref_of,
    store_clip,
    worker_speakers,
    worker_with,
)
from tests.waiting import soon
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers import ensure, pending
from vllm_tts_cache.entrypoints.speakers.ensure import SpeakerEncodings
from vllm_tts_cache.entrypoints.speakers.kv_warming import KVWarming
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor, SpeakerLookups
from vllm_tts_cache.entrypoints.speakers.served_model import ServedModel, Status
from vllm_tts_cache.errors import (
    AudioGoneError,
    EncodeError,
    EncodersChangedError,
    EncodeTimeoutError,
    GoneError,
    ServerBusyError,
    StorageError,
    WorkerRPCError,
)
from vllm_tts_cache.speaker.reference import EncodingNeed
from vllm_tts_cache.speaker.rpc_client import WANT, AsyncWorkers
from vllm_tts_cache.store.opening import open_store

NAMES = ("speaker", "codec")
NOTHING = frozenset()


class Rig:
    def __init__(self, directory, *, timeout_seconds=20.0, max_inline=64, **settings):
        self.encoders = [SpectrumEncoder(name) for name in NAMES]
        self.speakers = worker_speakers(directory, self.encoders, **settings)
        self.engine = InProcessEngine(worker_with(self.speakers))
        self.store = open_store(Settings(samples_dir=directory))
        self.ensurer = ensurer_of(
            self.engine, self.store, timeout_seconds=timeout_seconds, inline=max_inline
        )

    def need(self, seed=0, names=NAMES, segment=Segment.REGISTERED):
        ref = store_clip(self.store, clip(seed), segment)
        return EncodingNeed(ref=ref, encoder_names=names)

    @property
    def encodes(self):
        return self.speakers.stats().encodes

    async def entered(self):
        assert await asyncio.to_thread(self.encoders[0].entered.wait, 20)

    def begin(self, need, **how):
        return asyncio.create_task(self.ensurer.ensure(need, **how))

    async def hold(self, need, **how):
        """Begin it, and have the worker in the middle of its first encode."""
        self.encoders[0].gate.clear()
        begun = self.begin(need, **how)
        await self.entered()
        return begun

    def close(self):
        for encoder in self.encoders:
            encoder.gate.set()
        self.ensurer.shutdown()
        self.speakers.close()
        self.store.close()


def unstored(seed):
    return EncodingNeed(ref=ref_of(clip(seed, seconds=0.1)), encoder_names=("speaker",))


def ensurer_of(engine, store, *, timeout_seconds=5.0, inline=64, is_local=True):
    lookups = ReadExecutor(is_local=is_local)
    settings = Settings(
        encode_timeout_seconds=timeout_seconds, max_waiting_inline=inline
    )
    served = ServedModel(family=lambda: None, refusal=lambda: None, note=str)
    workers, finding = AsyncWorkers(engine), SpeakerLookups(store, lookups)
    given = store, settings, workers, served, lookups, finding
    return SpeakerEncodings(*given, KVWarming(None))


@pytest.fixture
async def rig_of(tmp_path):
    rigs = []

    def make(**options):
        rigs.append(Rig(tmp_path, **options))
        return rigs[-1]

    yield make
    for each in rigs:
        each.close()


@pytest.fixture
async def rig(rig_of):
    return rig_of()


def hold_up_answers(rig, monkeypatch):
    """Let a worker answer wants once the event is set, as one between two batches."""
    call, is_idle = rig.engine.collective_rpc, asyncio.Event()

    async def busy(method, **given):
        answers = await call(method, **given)
        if method == WANT.name:
            await is_idle.wait()
        return answers

    monkeypatch.setattr(rig.engine, "collective_rpc", busy)
    return is_idle


async def leave(*callers):
    for caller in callers:
        caller.cancel()
    await asyncio.wait(callers)


async def test_what_is_missing_is_encoded_and_what_is_there_is_not(rig):
    need = rig.need()
    assert await rig.ensurer.ensure(need) is False
    rig.engine.calls.clear()
    assert await rig.ensurer.ensure(need) is True
    assert rig.engine.calls == [], "a ready encoding costs no worker call"
    # It was stored since the caller looked.
    assert await rig.ensurer.ensure(need, stored=NOTHING) is False
    assert rig.encodes == {"speaker": 1, "codec": 1}
    assert rig.store.verify() == []


async def test_needs_that_overlap_encode_what_they_share_once(rig):
    need = rig.need()
    ref = ref_of(clip(), Segment.INLINE)
    inline = EncodingNeed(ref=ref, encoder_names=("speaker",))
    await asyncio.gather(rig.ensurer.ensure(need), rig.ensurer.ensure(inline))
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_1000_cold_voices_cost_no_more_than_10_calls_a_second(rig):
    """Each flight polled for itself: 1,000 registrations were 1,800 RPC/s."""
    needs = [unstored(seed) for seed in range(1000)]
    waiting = [await rig.hold(rig.need(1001, ("speaker",)), urgent=False)]
    waiting += [rig.begin(need, urgent=False) for need in needs]
    rig.engine.calls.clear()
    began = time.monotonic()
    await soon(lambda: rig.engine.calls.count("tts_cache_want") >= 5)
    calls = rig.engine.calls.count("tts_cache_want")
    assert calls / (time.monotonic() - began) <= 10
    assert len(rig.ensurer.pending) == 1001
    waits = rig.speakers.stats().waiting["registered"]
    assert waits <= 64 * calls  # a call costs a look at a file for each
    await leave(*waiting)
    assert len(rig.ensurer.pending) == 0


async def test_voices_that_keep_coming_cost_no_more_calls(rig):
    """What is new is told at once, but not each for itself."""
    rig.encoders[0].gate.clear()
    await rig.ensurer.fingerprints()
    waiting, began = [], time.monotonic()
    rig.engine.calls.clear()
    while time.monotonic() - began < 1.5:
        waiting.append(rig.begin(unstored(len(waiting))))
        await asyncio.sleep(0.01)
    seconds = time.monotonic() - began
    assert 1 <= rig.engine.calls.count("tts_cache_want") <= 1 + 10 * seconds
    await leave(*waiting)


async def test_an_inline_clip_goes_before_200_voices_that_nobody_waits_for(rig):
    """The worker is told of 64 at a time: of those first that requests wait for."""
    needs = [unstored(seed) for seed in range(200)]
    needs[0], needs[150] = (rig.need(seed, ("speaker",)) for seed in (0, 150))
    rig.encoders[0].gate.clear()
    precomputing = [rig.begin(need, urgent=False) for need in needs]
    await rig.entered()
    await asyncio.sleep(0.5)
    inline = rig.begin(rig.need(999, ("speaker",), Segment.INLINE))
    await soon(lambda: rig.speakers.stats().waiting["inline"] == 1)
    registered = rig.begin(needs[150])
    [key] = await rig.ensurer.keys(needs[150])
    line = rig.speakers.queue._line.jobs
    await soon(lambda: (job := line.get(key)) and job.is_urgent)
    order = order_of(rig.encoders[0])
    rig.encoders[0].gate.set()
    await asyncio.gather(inline, registered)
    assert order[:2] == [clip(999).audio_sha256, needs[150].ref.audio_sha256]
    await leave(*precomputing)


async def test_a_request_does_not_stand_in_line_for_ever(rig_of, monkeypatch):
    """Others were always before it, and that they got on was all it was told."""
    monkeypatch.setattr(ensure, "MAX_TIMEOUTS_IN_LINE", 0.1)
    rig = rig_of(timeout_seconds=10.0)
    held = await rig.hold(rig.need(0, ("speaker",)), urgent=False)
    inline = rig.need(1, ("speaker",), Segment.INLINE)
    with pytest.raises(ServerBusyError) as caught:
        await rig.ensurer.ensure(inline)
    assert caught.value.retry_after_seconds > 0
    assert len(rig.ensurer.pending) == 1  # that of no request, which waits on
    rig.encoders[0].gate.set()
    assert await held is False


# Its own line is full, or that of the worker, which other API servers fill as well.
@pytest.mark.parametrize("full", ["max_inline", "max_waiting_inline"])
async def test_too_many_inline_clips_are_refused_with_a_time_to_come_back(rig_of, full):
    rig = rig_of(**{full: 2})
    needs = [rig.need(seed, segment=Segment.INLINE) for seed in range(4)]
    waiting = [await rig.hold(needs[0]), *map(rig.begin, needs[1:])]
    await soon(lambda: sum(task.done() for task in waiting) == 2)
    rig.encoders[0].gate.set()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    refused = [each for each in done if isinstance(each, ServerBusyError)]
    assert len(refused) == 2  # a clip waits once, whatever number of encoders it needs
    assert all(each.retry_after_seconds > 0 for each in refused)
    assert await rig.ensurer.ensure(needs[3]) is (done[3] is False)


async def test_a_caller_that_leaves_does_not_cancel_what_another_waits_for(rig):
    need = rig.need()
    rig.encoders[0].gate.clear()
    leaving, staying = rig.begin(need), rig.begin(need)
    await rig.entered()
    await leave(leaving)
    assert leaving.cancelled()
    rig.encoders[0].gate.set()
    assert await staying is False
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_a_failure_is_told_to_all_until_the_next_call_tries_again(rig):
    need = rig.need()
    rig.encoders[1].errors = [EncodeError("the codec had enough")]
    results = await asyncio.gather(
        *(rig.ensurer.ensure(need) for _ in range(3)), return_exceptions=True
    )
    for result in results:
        assert isinstance(result, EncodeError)
        assert "the codec had enough" in str(result)
    restarted = ensurer_of(rig.engine, rig.store)
    for ensurer in (rig.ensurer, restarted):
        status = await ensurer.status_of(need, NOTHING)
        assert status[:3] == ("failed", "the codec had enough", 1)
        assert (status.next_try or 0) > time.time()
    assert await rig.ensurer.ensure(need) is False
    assert rig.store.failures(need.ref.audio_sha256) == {}


async def test_audio_that_is_not_stored_is_told_apart_from_a_failure(rig):
    need = EncodingNeed(ref=ref_of(clip()), encoder_names=NAMES)
    with pytest.raises(AudioGoneError):
        await rig.ensurer.ensure(need)
    status = await rig.ensurer.status_of(need, NOTHING)
    assert status == ("failed", "its reference audio is not stored", None, None)


async def test_a_timeout_says_how_long_it_was_and_what_to_set(rig_of):
    rig = rig_of(timeout_seconds=0.3)
    rig.encoders[0].gate.clear()
    with pytest.raises(EncodeTimeoutError, match=r"within 0\.3 s") as caught:
        await rig.ensurer.ensure(rig.need(names=("speaker",)))
    assert "SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS" in str(caught.value)


async def test_who_waits_in_line_is_patient_while_the_worker_gets_on(rig_of):
    """The deadline ran from the request: those behind 120 s of queue gave up."""
    # Longer than a busy machine may leave the encode thread alone.
    rig = rig_of(timeout_seconds=3.0)

    def slowly(audio, encode=rig.encoders[0].encode):
        time.sleep(0.5)
        return encode(audio)

    rig.encoders[0].encode = slowly
    needs = [rig.need(seed, ("speaker",)) for seed in range(7)]
    began = time.monotonic()
    # A request gives up after five timeouts in all, which a busy machine may take.
    waits = (rig.ensurer.ensure(need, urgent=False) for need in needs)
    await asyncio.gather(*waits)
    assert time.monotonic() - began > 3.3


async def test_forcing_encodes_anew_and_takes_nothing_away_meanwhile(rig):
    """It deleted the encodings first: running requests failed in the engine."""
    need = rig.need()
    await rig.ensurer.ensure(need)
    rig.encoders[0].entered.clear()
    rig.encoders[0].gate.clear()
    forcing = [rig.begin(need, force=True) for _ in range(3)]
    await rig.entered()
    assert rig.speakers.prompt(need.ref, NAMES).keys() == set(NAMES)
    assert await rig.ensurer.ensure(need) is True
    rig.encoders[0].gate.set()
    assert await asyncio.gather(*forcing) == [False] * 3
    assert rig.encodes == {"speaker": 2, "codec": 2}


async def test_what_is_forced_is_waited_for_on_each_replica(rig, rig_of, monkeypatch):
    monkeypatch.setattr(pending, "RENEW_SECONDS", 0.1)
    need, other = rig.need(names=("codec",)), rig_of()
    rig.engine.workers += other.engine.workers
    other.speakers.sleep()
    forcing = rig.begin(need, force=True)
    await soon(lambda: rig.encodes["codec"] == 1)
    await asyncio.sleep(0.5)
    assert not forcing.done()
    other.speakers.wake_up()
    assert await forcing is False
    assert other.encodes["codec"] == 1


async def test_the_status_follows_the_encodings_and_calls_no_worker(rig):
    need = rig.need()
    await rig.ensurer.fingerprints()
    rig.engine.calls.clear()
    assert await rig.ensurer.status_of(need, NOTHING) == Status("pending")
    assert rig.engine.calls == []
    flight = await rig.hold(need)
    assert await rig.ensurer.status_of(need, NOTHING) == Status("processing")
    rig.encoders[0].gate.set()
    await flight
    stored = rig.store.stored_artifacts([need.ref.audio_sha256])[need.ref.audio_sha256]
    assert await rig.ensurer.status_of(need, stored) == Status("ready")


async def test_an_encoding_that_went_with_its_voice_is_told_apart_from_a_failure(rig):
    need = rig.need()
    await rig.ensurer.ensure(need)
    (key, *_) = await rig.ensurer.keys(need)
    rig.store.files.remove(key.audio_sha256, [key.encoder_fingerprint])
    rig.speakers.delete([key.audio_sha256])
    with pytest.raises(GoneError):
        await rig.ensurer.encoding(key)
    assert await rig.ensurer.ensure(need) is False  # looked for, and made again
    await rig.ensurer.encoding(key)


async def test_workers_with_different_encoders_are_refused(tmp_path):
    one, other = SpectrumEncoder("speaker"), SpectrumEncoder("speaker")
    other.fingerprint = "f" * 64
    speakers = [worker_speakers(tmp_path, [each]) for each in (one, other)]
    engine = InProcessEngine(worker_with(speakers[0]), worker_with(speakers[1], rank=1))
    ensurer = ensurer_of(engine, open_store(Settings(samples_dir=tmp_path)))
    with pytest.raises(WorkerRPCError, match="different encoders"):
        await ensurer.fingerprints()
    for each in speakers:
        each.close()


async def test_what_is_shut_down_asks_no_more_and_whoever_waits_hears_so(rig):
    """It began anew for those who waited, and asked as long as they did."""
    waiting = await rig.hold(rig.need())
    rig.ensurer.shutdown()
    for caller in (waiting, rig.ensurer.ensure(rig.need(1))):
        with pytest.raises(ServerBusyError, match="shutting down"):
            await asyncio.wait_for(caller, 60)
    await asyncio.sleep(0.1)
    rig.engine.calls.clear()
    await asyncio.sleep(0.5)
    assert rig.engine.calls == []
    assert len(rig.ensurer.pending) == 0


async def test_an_encoding_is_heard_of_before_a_busy_worker_answers(rig, monkeypatch):
    """A diffusion model's worker answers between two batches."""
    is_idle = hold_up_answers(rig, monkeypatch)
    assert await asyncio.wait_for(rig.ensurer.ensure(rig.need()), 60) is False
    other = rig.begin(rig.need(1))
    await asyncio.sleep(0.1)
    assert not other.done()  # it is not told of yet
    is_idle.set()
    assert await asyncio.wait_for(other, 60) is False
    assert rig.encodes == {"speaker": 2, "codec": 2}


async def test_audio_that_is_stored_is_no_encoding_to_tell_of(rig):
    rig.need()
    last_id, keys = rig.ensurer.pending._stored_since(0)
    assert last_id and not keys


async def test_a_disk_that_fails_meanwhile_is_told_to_all_who_wait(rig, monkeypatch):
    pending = rig.ensurer.pending
    look, fails = pending._stored_since, False

    def failing(*since):
        if fails:
            raise StorageError("the disk has a fault")
        return look(*since)

    await rig.ensurer.fingerprints()
    for encoder in rig.encoders:
        encoder.gate.clear()
    is_idle = hold_up_answers(rig, monkeypatch)
    monkeypatch.setattr(pending, "_stored_since", failing)
    waiting = [await rig.hold(rig.need()), rig.begin(rig.need(1))]
    await asyncio.sleep(0.1)
    fails = True
    for caller in waiting:
        with pytest.raises(StorageError, match="fault"):
            await asyncio.wait_for(caller, 60)
    assert len(rig.ensurer.pending) == 0
    fails = False
    is_idle.set()
    again = rig.begin(rig.need(1))
    for encoder in rig.encoders:
        encoder.gate.set()
    assert await asyncio.wait_for(again, 60) is False


async def test_a_worker_that_is_busy_for_too_long_has_failed_nobody(rig, monkeypatch):
    """Nor those who came while it was asked, of whom it was never told."""
    call, until = rig.engine.collective_rpc, time.monotonic() + 1.0

    async def busy(method, **given):
        if method == WANT.name and time.monotonic() < until:
            await asyncio.sleep(0.4)
            raise TimeoutError("the host's, after 30 s")
        return await call(method, **given)

    await rig.ensurer.fingerprints()
    monkeypatch.setattr(rig.engine, "collective_rpc", busy)
    first = rig.begin(rig.need())
    await asyncio.sleep(0.3)
    second = rig.begin(rig.need(1))
    assert await asyncio.wait_for(asyncio.gather(first, second), 60) == [False, False]


async def test_who_leaves_ends_nobody_elses_wait(rig):
    """Its caller waited for ever: nobody asked for the want any more."""
    pending = rig.ensurer.pending
    need = rig.need(names=("codec",))
    [key] = await rig.ensurer.keys(need)
    how = {"tenant": "", "urgent": True}
    left = pending.join(key, Segment.INLINE, **how)
    pending.leave(left)
    stays = pending.join(key, Segment.INLINE, **how)
    pending._settle(left)
    pending._settle(left, EncodeError("of the one that left"))
    assert pending._by_key[key] is stays and not stays.future.done()
    assert await asyncio.wait_for(rig.ensurer.ensure(need), 60) is False
    pending.leave(stays)
    assert (len(pending), pending.refuses("one more")) == (0, False)


async def test_an_inline_clip_that_is_registered_leaves_its_place_to_another(rig_of):
    pending = rig_of(max_inline=2).ensurer.pending
    join = lambda name, segment: pending.join(  # noqa: E731
        make_key(name), segment, tenant="", urgent=True
    )
    waits = [join(name, Segment.INLINE) for name in ("clip 1", "clip 2")]
    with pytest.raises(ServerBusyError):
        join("clip 3", Segment.INLINE)
    waits.append(join("clip 1", Segment.REGISTERED))
    waits.append(join("clip 3", Segment.INLINE))
    assert pending.refuses("one more")
    for wait in waits:
        pending.leave(wait)
    assert (len(pending), pending.refuses("one more")) == (0, False)


async def test_no_answer_that_is_lost_loses_a_want(rig, monkeypatch):
    """One failed RPC ended every want of the process."""
    call, lost = rig.engine.collective_rpc, []

    async def losing(method, **given):
        answers = await call(method, **given)
        if method == WANT.name and len(lost) < 6:
            lost.append(method)
            if len(lost) % 2:
                raise RuntimeError("lost on its way back")
        return answers

    await rig.ensurer.fingerprints()
    monkeypatch.setattr(rig.engine, "collective_rpc", losing)
    for force in (False, True, True):
        made = rig.ensurer.ensure(rig.need(), force=force)
        assert await asyncio.wait_for(made, 60) is False
    assert rig.encodes == {"speaker": 3, "codec": 3}


async def test_a_worker_that_forgot_is_told_again(rig):
    """It was started anew, or the lease ran out while nobody could ask it."""
    held = await rig.hold(rig.need(names=("speaker",)))
    waiting = rig.begin(rig.need(1, ("speaker",)))
    await soon(lambda: rig.speakers.stats().waiting["registered"] == 1)
    rig.speakers.queue._drop_expired(float("inf"))
    assert rig.speakers.stats().waiting["registered"] == 0
    await soon(lambda: rig.speakers.stats().waiting["registered"] == 1)
    rig.encoders[0].gate.set()
    assert await asyncio.gather(held, waiting) == [False, False]


async def test_a_catalogue_that_is_away_for_a_second_fails_nobody(rig, monkeypatch):
    """One failed look ended every want; eleven of twelve voices were never encoded."""
    pending = rig.ensurer.pending
    look, until = pending._stored_since, time.monotonic() + 1.0

    def away(*since):
        if time.monotonic() < until:
            raise StorageError("it is started anew")
        return look(*since)

    monkeypatch.setattr(pending, "_stored_since", away)
    needs = [rig.need(seed) for seed in range(3)]
    waits = [rig.ensurer.ensure(need) for need in needs]
    assert await asyncio.wait_for(asyncio.gather(*waits), 60) == [False] * 3


async def test_encoders_that_are_loaded_anew_are_asked_for_once_more(rig):
    """Fingerprints were asked once: the old codes met the new encoder's."""
    need = rig.need(names=("codec",))
    assert await rig.ensurer.ensure(need) is False
    other = SpectrumEncoder("codec")
    other.fingerprint = "f" * 64
    rig.speakers.fingerprints = rig.speakers.load_encoders(lambda: {"codec": other})
    new = rig.need(1, names=("codec",))
    with pytest.raises(EncodersChangedError):
        await rig.ensurer.ensure(new)
    rig.ensurer.recheck(need.ref.audio_sha256)
    assert await rig.ensurer.ensure(need) is await rig.ensurer.ensure(new) is False
    assert (await rig.ensurer.fingerprints())["codec"] == "f" * 64
    assert other.num_calls == 2


async def steps_of_a_turn(rig, num_waiting):
    """How many bytecodes the shortest of some turns executes in which nothing happens.

    In others the loop's own turn may fall into an await.
    """
    pending = rig.ensurer.pending
    for number in range(num_waiting):
        key = make_key(f"{num_waiting} {number}")
        pending.join(key, Segment.REGISTERED, tenant="", urgent=False)
    await pending._look()
    return min([await steps_of_this_turn(pending) for _ in range(10)])


async def steps_of_this_turn(pending):
    num_steps = 0

    def trace(frame, event, arg):
        nonlocal num_steps
        frame.f_trace_opcodes = True
        num_steps += event == "opcode"
        return trace

    pending._progress_at = pending._asked_at = time.monotonic()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        await pending._look()
        await pending._ask_and_look()
        pending._expire(pending._num_finished)
    finally:
        sys.settrace(before)
    return num_steps


async def test_a_turn_costs_no_more_when_very_many_wait(rig):
    """It went through all of them 50 times a second, on the event loop."""
    few = await steps_of_a_turn(rig, 100)
    many = await steps_of_a_turn(rig, 2000)
    assert few > 0
    assert many < few + 100


async def test_a_wait_ends_where_only_the_catalogue_answers(rig, monkeypatch):
    """Each look that went well made it forget for how long it had asked in vain."""
    monkeypatch.setattr(pending, "OUTAGE_SECONDS", 1.0)
    call, is_away = rig.engine.collective_rpc, False

    async def away(method, **given):
        if is_away:
            raise RuntimeError("gone")
        return await call(method, **given)

    monkeypatch.setattr(rig.engine, "collective_rpc", away)
    waiting = await rig.hold(rig.need(names=("speaker",)))
    is_away = True
    with pytest.raises(WorkerRPCError, match="gone"):
        await asyncio.wait_for(waiting, 60)
    assert len(rig.ensurer.pending) == 0


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_what_is_stored_ends_a_wait_without_a_worker(rig, monkeypatch, error):
    need = rig.need(names=("speaker",))
    (key,) = await rig.ensurer.keys(need)
    monkeypatch.setattr(rig.engine, "collective_rpc", AsyncMock(side_effect=error))
    waiting = rig.begin(need)
    await asyncio.sleep(0.2)
    assert rig.store.writer.publish(key, sized_encoding(10))
    assert await asyncio.wait_for(waiting, 12) is False


async def test_wants_are_told_again_though_that_answer_was_lost(rig, monkeypatch):
    """The worker had dropped them, and only the lost answer had told."""
    call, do_lose = rig.engine.collective_rpc, False

    async def losing(method, **given):
        nonlocal do_lose
        answers = await call(method, **given)
        if method == WANT.name and do_lose:
            do_lose = False
            raise TimeoutError("the host's, after 30 s")
        return answers

    monkeypatch.setattr(rig.engine, "collective_rpc", losing)
    needs = [rig.need(seed, ("speaker",)) for seed in range(3)]
    waits = [await rig.hold(needs[0]), *map(rig.begin, needs[1:])]
    await soon(lambda: rig.speakers.stats().waiting["registered"] == 2)
    rig.speakers.queue._drop_expired(float("inf"))
    do_lose = True
    await soon(lambda: not do_lose)
    rig.encoders[0].gate.set()
    assert await asyncio.wait_for(asyncio.gather(*waits), 60) == [False] * 3


async def test_a_tenant_waits_in_its_own_turn_for_what_another_wants_too(rig):
    """It waited behind all that the other had asked for before."""
    order = order_of(rig.encoders[0])
    needs = [rig.need(seed, ("speaker",)) for seed in range(12)]
    waits = [await rig.hold(needs[0], tenant="flood")]
    waits += [rig.begin(need, tenant="flood") for need in needs[1:]]
    await soon(lambda: rig.speakers.stats().waiting["registered"] == 11)
    waits.append(rig.begin(needs[-1], tenant="acme"))
    [key] = await rig.ensurer.keys(needs[-1])
    line = rig.speakers.queue._line.jobs
    await soon(lambda: len(line.get(key).flows) == 2)
    rig.encoders[0].gate.set()
    await asyncio.gather(*waits)
    assert order.index(needs[-1].ref.audio_sha256) <= 2
