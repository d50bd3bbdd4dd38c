import asyncio
import logging
import threading

import pytest

from tests.in_process_workers import (
    InProcessEngine,
    SpectrumEncoder,
    clip,
    ref_of,
    worker,
    worker_speakers,
    worker_with,
)
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.ensure import EncodingNeed, Ensurer, need_of
from vllm_tts_cache.entrypoints.workers import UnsupportedModelError, Workers
from vllm_tts_cache.errors import EncodeError, EncodeTimeoutError
from vllm_tts_cache.store.audio_wiring import open_audio
from vllm_tts_cache.store.wiring import open_disk

NAMES = ("speaker", "codec")


class Rig:
    """An ensurer and one worker over the same directory."""

    def __init__(self, directory, *, timeout_seconds=10.0):
        settings = Settings(samples_dir=directory)
        self.encoders = [SpectrumEncoder(name) for name in NAMES]
        self.speakers = worker_speakers(directory, self.encoders)
        self.engine = InProcessEngine(worker_with(self.speakers))
        self.disk = open_disk(settings)
        self.audio = open_audio(settings)
        self.ensurer = Ensurer(
            Workers(self.engine), self.disk, timeout_seconds=timeout_seconds
        )

    def store(self, audio, names=NAMES):
        self.audio.put(audio, Segment.REGISTERED)
        return EncodingNeed(ref=ref_of(audio), encoder_names=names)

    @property
    def encodes(self):
        return self.speakers.stats()["encodes"]

    async def entered(self, index=0):
        assert await asyncio.to_thread(self.encoders[index].entered.wait, 10)


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    for encoder in made.encoders:
        encoder.gate.set()


async def test_what_is_missing_is_encoded_and_what_is_there_is_not(rig):
    need = rig.store(clip())
    assert await rig.ensurer.ensure(need) is False
    assert await rig.ensurer.ensure(need) is True
    assert rig.encodes == {"speaker": 1, "codec": 1}
    assert rig.disk.verify() == []


async def test_a_ready_encoding_costs_no_worker_call(rig):
    need = rig.store(clip())
    await rig.ensurer.ensure(need)
    rig.engine.calls.clear()
    assert await rig.ensurer.ensure(need)
    assert rig.engine.calls == []


async def test_an_x_vector_need_runs_its_one_encoder(rig):
    await rig.ensurer.ensure(rig.store(clip(), ("speaker",)))
    assert rig.encodes == {"speaker": 1, "codec": 0}


async def test_8_concurrent_callers_share_one_flight(rig):
    need = rig.store(clip())
    found = await asyncio.gather(*(rig.ensurer.ensure(need) for _ in range(8)))
    assert found == [False] * 8
    assert rig.encodes == {"speaker": 1, "codec": 1}
    assert rig.engine.calls.count("tts_cache_prepare") == 1
    assert rig.ensurer.num_flights == 0


async def test_needs_that_overlap_encode_what_they_share_once(rig):
    audio = clip()
    inline = need_of(audio.audio_sha256, Segment.INLINE, ("speaker",))
    await asyncio.gather(
        rig.ensurer.ensure(rig.store(audio)), rig.ensurer.ensure(inline)
    )
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_two_servers_on_one_directory_encode_once(rig, tmp_path):
    other, need = Rig(tmp_path), rig.store(clip())
    await asyncio.gather(rig.ensurer.ensure(need), other.ensurer.ensure(need))
    total = {name: rig.encodes[name] + other.encodes[name] for name in NAMES}
    assert total == {"speaker": 1, "codec": 1}


async def test_a_caller_that_leaves_does_not_cancel_the_flight(rig):
    need = rig.store(clip())
    rig.encoders[0].gate.clear()
    leaving = asyncio.create_task(rig.ensurer.ensure(need))
    staying = asyncio.create_task(rig.ensurer.ensure(need))
    await rig.entered()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert rig.ensurer.num_flights == 1
    rig.encoders[0].gate.set()
    assert await staying is False
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_the_flight_of_the_only_caller_goes_on_after_it_left(rig):
    need = rig.store(clip())
    rig.encoders[0].gate.clear()
    leaving = asyncio.create_task(rig.ensurer.ensure(need))
    await rig.entered()
    leaving.cancel()
    rig.encoders[0].gate.set()
    await rig.ensurer.start(need)
    assert await rig.ensurer.is_ready(need)
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_a_failure_tells_its_reason_to_all_and_the_next_call_tries_again(rig):
    need = rig.store(clip())
    rig.encoders[1].errors = [EncodeError("the codec had enough")]
    results = await asyncio.gather(
        *(rig.ensurer.ensure(need) for _ in range(3)), return_exceptions=True
    )
    for result in results:
        assert isinstance(result, EncodeError)
        assert str(result).endswith("was not encoded: the codec had enough")
    assert await rig.ensurer.status(need) == ("failed", "the codec had enough")
    assert await rig.ensurer.ensure(need) is False
    assert await rig.ensurer.status(need) == ("ready", None)


async def test_audio_that_is_not_stored_is_a_failure_with_that_reason(rig):
    need = EncodingNeed(ref=ref_of(clip()), encoder_names=NAMES)
    with pytest.raises(EncodeError, match="reference audio is not stored"):
        await rig.ensurer.ensure(need)


async def test_a_failure_that_nobody_waited_for_is_logged(rig, caplog):
    need = EncodingNeed(ref=ref_of(clip()), encoder_names=NAMES)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait([rig.ensurer.start(need)])
        await asyncio.sleep(0)
    assert "not stored" in caplog.text
    assert rig.ensurer.num_flights == 0


async def test_a_timeout_says_how_long_it_was_and_what_to_set(tmp_path):
    rig = Rig(tmp_path, timeout_seconds=0.1)
    need = rig.store(clip())
    rig.encoders[0].gate.clear()
    try:
        with pytest.raises(EncodeTimeoutError) as caught:
            await rig.ensurer.ensure(need)
        message = str(caught.value)
        assert "within 0.1 s" in message
        assert "SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS" in message
        assert await rig.ensurer.status(need) == ("processing", None)
    finally:
        rig.encoders[0].gate.set()
    while not await rig.ensurer.is_ready(need):
        await asyncio.sleep(0.005)
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_the_status_follows_the_encodings(rig):
    need = rig.store(clip())
    assert await rig.ensurer.status(need) == ("pending", None)
    rig.encoders[0].gate.clear()
    flight = rig.ensurer.start(need)
    await rig.entered()
    assert await rig.ensurer.status(need) == ("processing", None)
    rig.encoders[0].gate.set()
    await flight
    assert await rig.ensurer.status(need) == ("ready", None)
    while rig.speakers.stats()["in_flight"]:  # the file is there a moment earlier
        await asyncio.sleep(0.001)
    rig.speakers.forget([need.ref.audio_sha256])
    assert await rig.ensurer.status(need) == ("pending", None)


async def test_another_servers_encode_shows_as_processing(rig):
    need = rig.store(clip())
    rig.encoders[0].gate.clear()
    rig.speakers.prepare(need.ref, NAMES, encodes=True)
    await rig.entered()
    assert await rig.ensurer.status(need) == ("processing", None)


async def test_a_disk_that_cannot_be_written_costs_the_file_only(rig, tmp_path):
    need = rig.store(clip())
    encodings = tmp_path / "encodings"
    if encodings.exists():
        encodings.rename(tmp_path / "aside")
    encodings.write_text("a file where the tier's directory should be")
    assert await rig.ensurer.ensure(need) is False
    assert await rig.ensurer.status(need) == ("ready", None)
    assert rig.speakers.prompt(need.ref, NAMES).keys() == set(NAMES)
    await rig.ensurer.ensure(need)
    assert rig.encodes == {"speaker": 1, "codec": 1}
    assert rig.speakers.stats()["in_place_encodes"] == 0


async def test_workers_with_different_encoders_are_refused(tmp_path):
    one, other = SpectrumEncoder("speaker"), SpectrumEncoder("speaker")
    other.fingerprint = "f" * 64
    engine = InProcessEngine(
        worker_with(worker_speakers(tmp_path, [one])),
        worker_with(worker_speakers(tmp_path, [other]), rank=1),
    )
    ensurer = Ensurer(Workers(engine), open_disk(Settings(samples_dir=tmp_path)), 1.0)
    with pytest.raises(EncodeError, match="different encoders"):
        await ensurer.fingerprints()


async def test_a_model_that_clones_nothing_is_said_so(tmp_path):
    engine = InProcessEngine(worker(object()))
    ensurer = Ensurer(Workers(engine), open_disk(Settings(samples_dir=tmp_path)), 1.0)
    need = EncodingNeed(ref=ref_of(clip()), encoder_names=NAMES)
    with pytest.raises(UnsupportedModelError, match="clones no voices"):
        await ensurer.ensure(need)


async def test_waiting_leaves_the_event_loop_free(rig):
    need = rig.store(clip())
    rig.encoders[0].gate.clear()
    flight = rig.ensurer.start(need)
    threading.Timer(0.2, rig.encoders[0].gate.set).start()
    ticks = 0
    while not flight.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks > 5
