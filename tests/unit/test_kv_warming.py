"""Which voices are prefilled, and when; that they are is shown on a real server."""

import asyncio
from dataclasses import fields
from typing import Any

import pytest

from tests.waiting import soon
from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints import kv_warming
from vllm_tts_cache.entrypoints.kv_warming import MAX_STOPS, MAX_UNSPOKEN, KVWarming
from vllm_tts_cache.errors import SpeakerNotFoundError


class Engine:
    """One that prefills when it is let, and notes whose."""

    def __init__(self):
        self.is_possible = self.is_idle = True
        self.prefilled, self.cancelled = [], []
        self.error = None
        self.gate = asyncio.Event()
        self.gate.set()

    def helps(self, record):
        return record.ref_text is not None

    async def prefill(self, record):
        self.prefilled.append(record.name)
        if self.error is not None:
            raise self.error
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(record.name)
            raise


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
async def warming(engine, monkeypatch):
    monkeypatch.setattr(kv_warming, "LOOK_SECONDS", 0.001)
    made = KVWarming(engine, is_on=True)
    yield made
    made.shutdown()


def record(number, **changed: Any):
    nothing: dict[str, Any] = {f.name: None for f in fields(SpeakerRecord)}
    known: dict[str, Any] = {"ref_text": "Hello.", "audio_sha256": f"{number:064x}"}
    known["name"] = known["speaker_id"] = f"voice-{number}"
    return SpeakerRecord(**nothing | known | changed)


async def test_what_is_precomputed_is_prefilled_in_turn(engine, warming):
    for number in range(3):
        warming.add(record(number))
    warming.add(record(0))
    await soon(lambda: len(engine.prefilled) == 3)
    assert engine.prefilled == ["voice-0", "voice-1", "voice-2"]
    await soon(lambda: warming.stats()["warmed"] == 3)
    assert warming.stats() == {"warmed": 3, "failed": 0, "left_out": 0, "waiting": 0}


async def test_nothing_is_prefilled_beside_running_streams(engine, warming):
    engine.is_idle = False
    warming.add(record(0))
    await asyncio.sleep(0.05)
    assert engine.prefilled == []
    assert warming.stats()["waiting"] == 1
    engine.is_idle = True
    await soon(lambda: engine.prefilled == ["voice-0"])


async def test_a_request_that_begins_meanwhile_has_the_engine_for_itself(
    engine, warming
):
    """Only the start of a prefill waited for the engine to be idle."""
    engine.gate.clear()
    for number in range(2):
        warming.add(record(number))
    await soon(lambda: engine.prefilled == ["voice-0"])
    engine.is_idle = False
    warming.give_way()
    assert warming.stats()["waiting"] == 2
    await soon(lambda: engine.cancelled == ["voice-0"])
    await asyncio.sleep(0.05)
    assert engine.prefilled == ["voice-0"]
    engine.gate.set()
    engine.is_idle = True
    await soon(lambda: warming.stats()["warmed"] == 2)
    assert engine.prefilled == ["voice-0", "voice-1", "voice-0"]
    warming.give_way()  # with nothing in hand
    assert warming.stats() == {"warmed": 2, "failed": 0, "left_out": 0, "waiting": 0}


async def test_what_requests_end_again_and_again_is_left_to_the_first_text(
    engine, warming
):
    """It would begin anew after every request, and end as often."""
    engine.gate.clear()
    warming.add(record(0))
    for number in range(1, MAX_STOPS + 1):
        await soon(lambda number=number: len(engine.prefilled) == number)
        warming.give_way()
    await asyncio.sleep(0.05)
    assert engine.prefilled == engine.cancelled == MAX_STOPS * ["voice-0"]
    assert warming.stats() == {"warmed": 0, "failed": 0, "left_out": 1, "waiting": 0}
    warming.add(record(0))  # precomputed anew, it has as many tries
    await soon(lambda: len(engine.prefilled) == MAX_STOPS + 1)
    warming.give_way()
    assert warming.stats()["waiting"] == 1


async def test_thousands_that_nobody_speaks_with_leave_the_kv_to_others(
    engine, warming, monkeypatch
):
    numbers = range(3 * MAX_UNSPOKEN)
    for number in numbers:
        warming.add(record(number))
        await asyncio.sleep(0)
    await soon(lambda: warming.stats()["warmed"] == MAX_UNSPOKEN)
    assert warming.stats()["left_out"] == len(numbers) - MAX_UNSPOKEN
    # One is spoken with, so there is room for one.
    warming.delete(record(3).audio_sha256)
    for number in range(100, 102):
        warming.add(record(number))
    await soon(lambda: warming.stats()["warmed"] == MAX_UNSPOKEN + 1)
    # After a while nobody will.
    monkeypatch.setattr(kv_warming, "UNSPOKEN_SECONDS", 0.0)
    warming.add(record(200))
    await soon(lambda: engine.prefilled[-1] == "voice-200")


async def test_what_is_deleted_while_it_waits_is_not_prefilled(engine, warming):
    engine.is_idle = False
    for number in range(3):
        warming.add(record(number))
    warming.delete(record(1).audio_sha256)
    engine.is_idle = True
    await soon(lambda: warming.stats()["warmed"] == 2)
    assert engine.prefilled == ["voice-0", "voice-2"]
    engine.is_idle = False
    warming.add(record(5))
    warming.delete_all()
    engine.is_idle = True
    await asyncio.sleep(0.05)
    assert len(engine.prefilled) == 2


@pytest.mark.parametrize("is_all", [False, True])
async def test_a_prefill_in_hand_of_what_is_deleted_is_ended(engine, warming, is_all):
    engine.gate.clear()
    warming.add(record(0))
    await soon(lambda: engine.prefilled)
    warming.delete(record(1).audio_sha256)  # which is another one
    await asyncio.sleep(0.01)
    assert engine.cancelled == []
    warming.delete_all() if is_all else warming.delete(record(0).audio_sha256)
    await soon(lambda: engine.cancelled == ["voice-0"])
    engine.gate.set()
    warming.add(record(1))
    await soon(lambda: warming.stats()["warmed"] == 1)
    assert engine.prefilled == ["voice-0", "voice-1"]
    assert warming.stats()["failed"] == 0


async def test_a_prefill_that_fails_or_hangs_is_given_up(engine, warming, monkeypatch):
    engine.error = RuntimeError("asleep")
    warming.add(record(0))
    await soon(lambda: warming.stats()["failed"] == 1)
    engine.error = None
    warming.add(record(0))
    await soon(lambda: warming.stats()["warmed"] == 1)

    async def hang(_record):
        await asyncio.Event().wait()

    monkeypatch.setattr(kv_warming, "PREFILL_SECONDS", 0.01)
    monkeypatch.setattr(engine, "prefill", hang)
    warming.add(record(1))
    await soon(lambda: warming.stats()["failed"] == 2)


async def test_with_another_transcript_a_voice_is_prefilled_anew(engine, warming):
    """It is part of what its prompts begin with."""
    assert warming.add(record(0))
    await soon(lambda: warming.stats()["warmed"] == 1)
    assert not warming.add(record(0))
    engine.is_idle = False
    assert warming.add(record(0, ref_text="Good evening."))
    assert warming.add(record(0, ref_text="Good night."))
    assert warming.add(record(0, ref_text="Good night."))
    assert warming.stats()["waiting"] == 1
    engine.is_idle = True
    await soon(lambda: warming.stats()["warmed"] == 2)
    assert engine.prefilled == ["voice-0", "voice-0"]
    warming.delete(record(0).audio_sha256)
    assert warming.add(record(0, ref_text="Good night."))


async def test_a_voice_that_is_changed_takes_no_other_ones_place(engine, warming):
    """What was computed of its old transcript is nobody's."""
    for number in range(MAX_UNSPOKEN):
        warming.add(record(number))
    await soon(lambda: warming.stats()["warmed"] == MAX_UNSPOKEN)
    for text in ("Good morning.", "Good night."):
        assert warming.add(record(3, ref_text=text))
        await soon(lambda: warming.stats()["waiting"] == 0)
    assert not warming.add(record(100))
    assert warming.stats()["left_out"] == 1


async def test_a_prefill_in_hand_of_what_was_changed_is_ended(engine, warming):
    engine.gate.clear()
    warming.add(record(0))
    await soon(lambda: engine.prefilled == ["voice-0"])
    assert warming.add(record(0))  # as it is
    assert warming.add(record(0, ref_text="Good night."))
    await soon(lambda: engine.cancelled == ["voice-0"])
    engine.gate.set()
    await soon(lambda: warming.stats()["warmed"] == 1)
    assert engine.prefilled == ["voice-0", "voice-0"]
    assert warming.stats() == {"warmed": 1, "failed": 0, "left_out": 0, "waiting": 0}


async def test_two_voices_of_one_clip_are_prefilled_once(engine, warming):
    twin = record(1, audio_sha256=record(0).audio_sha256)
    for each in (record(0), twin):
        assert warming.add(each)
    await soon(lambda: warming.stats()["warmed"] == 1)
    await asyncio.sleep(0.01)
    assert engine.prefilled == ["voice-0"]
    assert not warming.add(twin)


async def test_what_was_prefilled_long_ago_is_prefilled_again(
    engine, warming, monkeypatch
):
    """Nobody has spoken with it, and it may be gone by now."""
    warming.add(record(0))
    await soon(lambda: warming.stats()["warmed"] == 1)
    monkeypatch.setattr(kv_warming, "UNSPOKEN_SECONDS", 0.0)
    assert warming.add(record(0))
    await soon(lambda: warming.stats()["warmed"] == 2)


async def test_of_two_voices_of_one_clip_the_one_that_stays_is_prefilled(
    engine, warming, monkeypatch
):
    async def prefill(record):
        engine.prefilled.append(record.name)
        if record.name == "voice-0":
            raise SpeakerNotFoundError(record.name)

    monkeypatch.setattr(engine, "prefill", prefill)
    warming.add(record(0))
    warming.add(record(1, audio_sha256=record(0).audio_sha256))
    await soon(lambda: warming.stats()["warmed"] == 1)
    assert engine.prefilled == ["voice-0", "voice-1"]
    assert warming.stats()["failed"] == 0


async def test_where_the_first_voice_shows_that_nothing_is_kept_no_other_is_tried(
    engine, warming, monkeypatch
):
    async def find_out(record):
        engine.prefilled.append(record.name)
        engine.is_possible = False
        raise LookupError("no states here")

    monkeypatch.setattr(engine, "prefill", find_out)
    for number in range(3):
        warming.add(record(number))
    await soon(lambda: engine.prefilled == ["voice-0"])
    await asyncio.sleep(0.05)
    assert engine.prefilled == ["voice-0"]
    assert warming.stats() is None
    engine.is_possible = True
    assert warming.stats() == {"warmed": 0, "failed": 0, "left_out": 0, "waiting": 0}


async def test_a_voice_that_leaves_nothing_behind_is_not_prefilled(engine, warming):
    warming.add(record(0, ref_text=None))
    warming.add(record(1))
    await soon(lambda: engine.prefilled == ["voice-1"])


@pytest.mark.parametrize("why", ["off", "no engine", "no shared KV"])
async def test_where_it_brings_nothing_nothing_is_done(engine, why):
    engine.is_possible = why != "no shared KV"
    warming = KVWarming(None if why == "no engine" else engine, is_on=why != "off")
    warming.add(record(0))
    assert warming.stats() is None
    await asyncio.sleep(0.01)
    assert engine.prefilled == []
