import asyncio
import sqlite3
import threading

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from tests.in_process_workers import (
    InProcessEngine,
    SpectrumEncoder,
    worker,
    worker_speakers,
    worker_with,
)
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints import running
from vllm_tts_cache.entrypoints.service import Upload
from vllm_tts_cache.entrypoints.wiring import open_service
from vllm_tts_cache.errors import (
    EncodeError,
    InvalidAudioError,
    InvalidSpeakerError,
    SpeakerExistsError,
    SpeakerNotFoundError,
)
from vllm_tts_cache.families import qwen3_tts

NAMES = ("speaker", "codec")


def wav(container="WAV", **kwargs):
    # Integers: libsndfile rounds floats differently for each container.
    samples = (voiced(**kwargs) * 32767).astype(np.int16)
    return sndfile_bytes(samples, 24_000, container)


def upload(name="Ann", ref_text=None):
    return Upload(name=name, consent="yes", ref_text=ref_text)


class Rig:
    """A service as the API process wires it, and one worker."""

    def __init__(self, directory, **settings):
        self.encoders = [SpectrumEncoder(name) for name in NAMES]
        self.speakers = worker_speakers(directory, self.encoders)
        self.engine = InProcessEngine(worker_with(self.speakers))
        settings = Settings(samples_dir=directory, **settings)
        self.service = open_service(settings, self.engine, lambda: qwen3_tts.FAMILY)
        self.storage = self.service.storage

    async def register(self, name="Ann", *, precompute=False, ref_text=None, **clip):
        done = await self.service.register_audio(
            upload(name, ref_text), wav(**clip), precompute=precompute
        )
        return done.record

    async def settled(self):
        """What was started in the background is over."""
        while self.service._background:
            await asyncio.wait(set(self.service._background))

    async def state(self, record):
        """The worker's of the x-vector, once its thread has put the encode away.

        Whoever waits for a file goes on as soon as it is there, a moment earlier.
        """
        states = self.speakers.states
        while (state := states(record.audio_sha256)["speaker"]) == "processing":
            await asyncio.sleep(0.001)
        return state

    @property
    def encodes(self):
        return self.speakers.stats()["encodes"]


@pytest.fixture
async def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    for encoder in made.encoders:
        encoder.gate.set()
    await made.settled()


async def test_a_registered_speaker_is_found_by_any_spelling_of_its_name(rig):
    record = await rig.register(" Ann ")
    assert await rig.service.get("ANN") == record
    assert await rig.service.find("Bob") is None
    with pytest.raises(SpeakerNotFoundError, match="'Bob'"):
        await rig.service.get("Bob")


async def test_what_another_server_registers_replaces_or_deletes_is_seen_at_once(
    rig, tmp_path
):
    other = Rig(tmp_path)
    assert await rig.service.find("Ann") is None
    for pitch_hz in (220, 330):
        record = await other.register(pitch_hz=pitch_hz)
        assert await rig.service.find("Ann") == record
    await other.service.delete("Ann")
    assert await rig.service.find("Ann") is None


async def test_a_registry_that_is_locked_is_waited_for_off_the_loop(rig, tmp_path):
    record = await rig.register()
    # In WAL mode a reader waits for nobody but one who has the file for itself.
    rig.storage.registry._database.close_idle()
    locking = sqlite3.connect(
        tmp_path / "registry.sqlite3", isolation_level=None, check_same_thread=False
    )
    locking.execute("PRAGMA locking_mode = EXCLUSIVE")
    locking.execute("BEGIN EXCLUSIVE")
    threading.Timer(0.3, locking.close).start()
    finding, ticks = asyncio.create_task(rig.service.find("Ann")), 0
    while not finding.done():
        await asyncio.sleep(0.005)
        ticks += 1
    assert ticks > 5
    assert await finding == record


async def test_precomputing_in_the_background_leaves_nothing_for_the_first_request(rig):
    record = await rig.register(precompute=True, ref_text="said")
    await rig.settled()
    assert await rig.service.status(record) == ("ready", None)
    assert rig.encodes == {"speaker": 1, "codec": 1}
    assert await rig.service.precompute(record, force=False) is True


async def test_without_precomputing_nothing_is_encoded(rig):
    record = await rig.register()
    await rig.settled()
    assert await rig.service.status(record) == ("pending", None)
    assert rig.engine.calls.count("tts_cache_prepare") == 0


async def test_a_speaker_without_a_transcript_needs_no_codes(rig):
    record = await rig.register()
    assert await rig.service.precompute(record, force=False) is False
    assert rig.encodes == {"speaker": 1, "codec": 0}


async def test_one_clip_under_two_names_and_as_flac_is_encoded_once(rig):
    for name, container in (("a", "WAV"), ("b", "WAV"), ("c", "FLAC")):
        record = await rig.register(name, container=container, ref_text=name)
        await rig.service.precompute(record, force=False)
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_forcing_encodes_again(rig):
    record = await rig.register()
    await rig.service.precompute(record, force=False)
    assert await rig.service.precompute(record, force=True) is False
    assert rig.encodes["speaker"] == 2


async def test_a_failed_precompute_is_told_kept_as_status_and_tried_again(rig):
    record = await rig.register()
    rig.encoders[0].errors = [EncodeError("no")]
    with pytest.raises(EncodeError, match="no"):
        await rig.service.precompute(record, force=False)
    assert await rig.service.status(record) == ("failed", "no")
    assert await rig.service.precompute(record, force=False) is False
    assert await rig.service.status(record) == ("ready", None)


async def test_an_embedding_is_ready_and_needs_no_worker(rig):
    done = await rig.service.register_embedding(upload(), (0.5, -1.0))
    rig.engine.calls.clear()
    assert await rig.service.status(done.record) == ("ready", None)
    assert await rig.service.precompute(done.record, force=True) is True
    assert rig.engine.calls == []
    await rig.service.delete("Ann")


@pytest.mark.parametrize("data", [b"", b"garbage", wav(seconds=0.5), wav(peak=0.0)])
async def test_a_failed_upload_leaves_the_speaker_as_it_was(rig, data):
    old = await rig.register()
    await rig.service.precompute(old, force=False)
    with pytest.raises(InvalidAudioError):
        await rig.service.register_audio(upload(), data, precompute=True)
    assert await rig.service.get("Ann") == old
    assert await rig.service.status(old) == ("ready", None)
    assert rig.storage.verify() == []


async def test_a_wrong_name_stores_nothing(rig):
    with pytest.raises(InvalidSpeakerError):
        await rig.register("")
    assert list(rig.storage.audio.iter_registered()) == []


async def test_replacing_releases_the_old_clip_and_the_generation_grows(rig):
    old = await rig.register(pitch_hz=220)
    await rig.service.precompute(old, force=False)
    new = await rig.register(pitch_hz=330)
    await rig.settled()
    assert new.generation > old.generation
    assert rig.storage.audio.path(old.audio_sha256) is None
    assert await rig.state(old) == "pending"
    assert rig.storage.verify() == []


async def test_registering_the_same_clip_again_keeps_its_encodings(rig):
    record = await rig.register()
    await rig.service.precompute(record, force=False)
    again = await rig.register()
    await rig.settled()
    assert await rig.service.status(again) == ("ready", None)
    assert rig.encodes["speaker"] == 1


async def test_an_immutable_registry_refuses_and_stays(tmp_path):
    rig = Rig(tmp_path, registration_policy="immutable")
    old = await rig.register(pitch_hz=220)
    with pytest.raises(SpeakerExistsError):
        await rig.register(pitch_hz=330)
    assert await rig.service.get("Ann") == old
    assert rig.storage.verify() == []


async def test_a_deleted_speaker_is_in_no_tier_when_the_answer_comes(rig):
    record = await rig.register()
    await rig.service.precompute(record, force=False)
    assert await rig.service.delete("ann") == record
    assert rig.engine.calls[-1] == "tts_cache_forget"
    assert await rig.state(record) == "pending"
    assert rig.storage.audio.path(record.audio_sha256) is None
    assert rig.storage.verify() == []
    with pytest.raises(SpeakerNotFoundError):
        await rig.service.delete("Ann")


async def test_deleting_one_of_two_names_keeps_what_the_other_needs(rig):
    record, other = await rig.register("Ann"), await rig.register("Bob")
    await rig.service.precompute(record, force=False)
    await rig.service.delete("Ann")
    assert rig.engine.calls.count("tts_cache_forget") == 0
    assert await rig.service.status(other) == ("ready", None)


async def test_deleting_waits_for_accepted_requests(rig):
    record = await rig.register()
    await rig.service.precompute(record, force=False)
    rig.service.running.enter(record.audio_sha256)
    deleting = asyncio.create_task(rig.service.delete("Ann"))
    await asyncio.sleep(0.1)
    assert not deleting.done()
    assert await rig.service.find("Ann") is None  # no new request starts with it
    assert await rig.state(record) == "ready"
    rig.service.running.leave(record.audio_sha256)
    await deleting
    assert await rig.state(record) == "pending"


async def test_a_request_that_never_ends_does_not_hold_up_a_delete_for_ever(
    rig, monkeypatch
):
    monkeypatch.setattr(running, "PATIENCE_SECONDS", 0.05)
    record = await rig.register()
    rig.service.running.enter(record.audio_sha256)
    await asyncio.wait_for(rig.service.delete("Ann"), 5)


async def test_deleting_while_it_is_encoded_leaves_nothing(rig):
    record = await rig.register()
    rig.encoders[0].gate.clear()
    flight = asyncio.create_task(rig.service.precompute(record, force=False))
    assert await asyncio.to_thread(rig.encoders[0].entered.wait, 10)
    await rig.service.delete("Ann")
    rig.encoders[0].gate.set()
    with pytest.raises(EncodeError, match="not stored"):
        await asyncio.wait_for(flight, 10)
    assert rig.speakers.states(record.audio_sha256)["speaker"] != "ready"
    assert rig.storage.verify() == []


async def test_a_model_without_a_speaker_side_still_deletes(tmp_path):
    rig = Rig(tmp_path)
    rig.engine.workers = (worker(object()),)
    record = await rig.register()
    assert await rig.service.delete("Ann") == record


async def test_a_page_is_ordered_bounded_searched_and_continued(rig):
    for name in ("carl", "Ann", "bob", "Bea"):
        await rig.service.register_embedding(upload(name), (1.0,))

    async def names(**query):
        query = {"limit": 10, "after": None, "search": None, **query}
        return [record.name for record in await rig.service.list(**query)]

    assert await names() == ["Ann", "Bea", "bob", "carl"]
    assert await names(limit=2) == ["Ann", "Bea"]
    assert await names(limit=2, after="Bea") == ["bob", "carl"]
    assert await names(search="B") == ["Bea", "bob"]


async def test_stats_count_speakers_and_tell_each_worker(rig):
    record = await rig.register()
    await rig.service.precompute(record, force=False)
    stats = await rig.service.stats()
    assert stats["registry"] == {"speakers": 1}
    assert stats["flights"] == 0
    (told,) = stats["workers"]
    assert told["encodes"] == {"speaker": 1, "codec": 0}
    assert told["tiers"]["memory"]["entries"] == 1
    assert told["tiers"]["disk"]["entries"] == 1
