import asyncio
import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path

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
from tests.store_samples import settings_of
from tests.waiting import soon
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints import uploads
from vllm_tts_cache.entrypoints.served_model import CannotCloneError, ServedModel
from vllm_tts_cache.entrypoints.service import open_service
from vllm_tts_cache.entrypoints.uploads import Upload
from vllm_tts_cache.errors import (
    EncodeError,
    InvalidAudioError,
    InvalidSpeakerError,
    ServerBusyError,
    SpeakerExistsError,
    SpeakerNotFoundError,
)
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.speaker.rpc_client import ForeignStoreError
from vllm_tts_cache.tenants import ALONE, Caller

NAMES = ("speaker", "codec")


def wav(container="WAV", **kwargs):
    # Integers: libsndfile rounds floats differently for each container.
    samples = (voiced(**kwargs) * 32767).astype(np.int16)
    return sndfile_bytes(samples, 24_000, container)


def upload(name="Ann", ref_text=None, **fields):
    return Upload(name=name, consent="yes", ref_text=ref_text, **fields)


def model(family, note=""):
    return ServedModel(family=lambda: family, refusal=lambda: None, note=lambda: note)


class Rig:
    """A service as the API process wires it, and one worker."""

    def __init__(self, directory, family=None, **settings):
        self.encoders = [SpectrumEncoder(name) for name in NAMES]
        self.speakers = worker_speakers(directory, self.encoders)
        self.engine = InProcessEngine(worker_with(self.speakers))
        settings = settings_of(directory, **settings)
        served = model(family or default_family())
        self.service = open_service(settings, self.engine, served)
        self.service.start()
        self.store = self.service.store

    async def register(self, name="Ann", *, precompute=False, ref_text=None, **clip):
        done = await self.service.register_audio(
            ALONE, upload(name, ref_text), wav(**clip), precompute=precompute
        )
        return done.record

    async def precompute(self, name="Ann", *, force=False):
        found = await self.service.lookups.get(ALONE, name)
        return await self.service.encodings.precompute(found, force=force)

    async def status(self, name="Ann"):
        return await self.service.encodings.status(
            await self.service.lookups.get(ALONE, name)
        )

    async def settled(self):
        """What was started in the background is over."""
        await self.service.encodings.settled()
        # Bounded: a test that failed half-way may have left a participant behind.
        until = time.monotonic() + 60
        while self.store.catalogue.num_unfinished_deletions():
            assert time.monotonic() < until
            await asyncio.sleep(0.01)

    @property
    def encodes(self):
        return self.speakers.stats().encodes

    async def close(self):
        for encoder in self.encoders:
            encoder.gate.set()
        await self.settled()
        self.service.shutdown()
        self.speakers.close()


@pytest.fixture
async def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    await made.close()


async def test_a_registered_speaker_is_found_by_any_spelling_of_its_name(rig):
    record = await rig.register(" Ann ")
    assert (await rig.service.lookups.get(ALONE, "ANN")).record == record
    assert await rig.service.lookups.find(ALONE, "Bob") is None
    with pytest.raises(SpeakerNotFoundError, match="'Bob'"):
        await rig.service.lookups.get(ALONE, "Bob")


async def test_what_another_server_registers_replaces_or_deletes_is_seen_at_once(
    rig, tmp_path
):
    other = Rig(tmp_path)
    assert await rig.service.lookups.find(ALONE, "Ann") is None
    for pitch_hz in (220, 330):
        record = await other.register(pitch_hz=pitch_hz)
        assert (await rig.service.lookups.get(ALONE, "Ann")).record == record
    await other.service.deletions.delete("Ann", ALONE.name)
    assert await rig.service.lookups.find(ALONE, "Ann") is None
    await other.close()


async def test_precomputing_in_the_background_leaves_nothing_for_the_first_request(rig):
    await rig.register(precompute=True, ref_text="said")
    await rig.settled()
    assert await rig.status() == ("ready", None)
    assert rig.encodes == {"speaker": 1, "codec": 1}
    assert await rig.precompute() is True


async def test_without_precomputing_nothing_is_encoded(rig):
    await rig.register()
    await rig.settled()
    assert await rig.status() == ("pending", None)
    assert rig.encodes == {"speaker": 0, "codec": 0}


async def test_a_speaker_without_a_transcript_needs_no_codes(rig):
    await rig.register()
    assert await rig.precompute() is False
    assert rig.encodes == {"speaker": 1, "codec": 0}


async def test_one_clip_under_two_names_and_as_flac_is_encoded_once(rig):
    for name, container in (("a", "WAV"), ("b", "WAV"), ("c", "FLAC")):
        await rig.register(name, container=container, ref_text=name)
        await rig.precompute(name)
    assert rig.encodes == {"speaker": 1, "codec": 1}


async def test_a_failed_precompute_is_told_kept_as_status_and_tried_again(rig):
    await rig.register()
    rig.encoders[0].errors = [EncodeError("no")]
    with pytest.raises(EncodeError, match="no"):
        await rig.precompute()
    status, reason = await rig.status()
    assert (status, "no" in (reason or "")) == ("failed", True)
    assert await rig.precompute() is False
    assert await rig.status() == ("ready", None)


async def test_an_embedding_is_ready_and_needs_no_worker(rig):
    await rig.service.register_embedding(ALONE, upload(), (0.5, -1.0))
    rig.engine.calls.clear()
    assert await rig.status() == ("ready", None)
    assert await rig.precompute(force=True) is True
    assert rig.engine.calls == []
    found = await rig.service.lookups.get(ALONE, "Ann")
    assert await rig.service.lookups.embedding(found.record) == (0.5, -1.0)


@pytest.mark.parametrize("data", [b"", b"garbage", wav(seconds=0.5), wav(peak=0.0)])
async def test_a_failed_upload_leaves_the_speaker_as_it_was(rig, data):
    old = await rig.register()
    await rig.precompute()
    with pytest.raises(InvalidAudioError):
        await rig.service.register_audio(ALONE, upload(), data, precompute=True)
    assert (await rig.service.lookups.get(ALONE, "Ann")).record == old
    assert await rig.status() == ("ready", None)
    assert rig.store.verify() == []


@pytest.mark.parametrize(
    "wrong",
    [
        upload(""),
        upload("default"),
        upload(ref_text="x" * 2001),
        upload(description="x" * 2001),
        upload(mime_type="x" * 128),
        upload(original_filename="x" * 256),
        Upload(name="Ann", consent="x" * 513),
    ],
)
async def test_a_field_that_is_wrong_is_refused_before_anything_is_decoded(
    rig, wrong, monkeypatch
):
    monkeypatch.setattr(uploads, "decode", None)
    with pytest.raises(InvalidSpeakerError):
        await rig.service.register_audio(ALONE, wrong, wav(), precompute=False)
    assert rig.store.catalogue.count() == 0


async def test_replacing_removes_the_old_clip_and_the_generation_grows(rig):
    old = await rig.register(pitch_hz=220)
    await rig.precompute()
    new = await rig.register(pitch_hz=330)
    await rig.settled()
    assert new.generation > old.generation
    assert not rig.store.has_audio(old.audio_sha256)
    assert rig.speakers.stats().tiers["memory"].entries == 0
    assert rig.store.verify() == []


async def test_registering_the_same_clip_again_keeps_its_encodings(rig):
    await rig.register()
    await rig.precompute()
    await rig.register()
    await rig.settled()
    assert await rig.status() == ("ready", None)
    assert rig.encodes["speaker"] == 1


async def test_an_immutable_registry_refuses_and_stays(tmp_path):
    rig = Rig(tmp_path, registration_policy="immutable")
    old = await rig.register(pitch_hz=220)
    with pytest.raises(SpeakerExistsError):
        await rig.register(pitch_hz=330)
    assert (await rig.service.lookups.get(ALONE, "Ann")).record == old
    assert rig.store.verify() == []
    await rig.close()


async def test_a_page_is_ordered_bounded_searched_and_continued(rig):
    for name in ("carl", "Ann", "bob", "Bea"):
        await rig.service.register_embedding(ALONE, upload(name), (1.0,))

    async def names(limit=10, **texts):
        page = Page(limit=limit, **texts)
        found = [record.name for record in await rig.service.lookups.records(page)]
        assert await rig.service.lookups.names(page) == found
        return found

    assert await names() == ["Ann", "Bea", "bob", "carl"]
    assert await names(limit=2) == ["Ann", "Bea"]
    assert await names(limit=2, after="Bea") == ["bob", "carl"]
    assert await names(search="B") == ["Bea", "bob"]


async def test_stats_count_what_is_stored_without_looking_at_the_disk(rig, monkeypatch):
    await rig.register()
    await rig.precompute()
    # A voice is ready once its encoding is on disk; the memory has it a moment later.
    await soon(lambda: not rig.speakers.stats().in_flight)

    def looked(*args):
        raise AssertionError("a directory was listed")

    for name in ("os.listdir", "os.scandir"):
        monkeypatch.setattr(name, looked)
    stats = await rig.service.stats(Caller(tenant=ALONE))
    monkeypatch.undo()
    assert stats["registry"] == {"speakers": 1}
    registered = stats["storage"][Segment.REGISTERED.value]
    assert registered["audio"]["files"] == registered["encodings"]["files"] == 1
    assert registered["audio"]["bytes"] > registered["encodings"]["bytes"] > 0
    assert stats["storage"]["inline"]["audio"] == {"files": 0, "bytes": 0}
    assert (stats["flights"], stats["deletions"]) == (0, {"unfinished": 0})
    (told,) = stats["workers"]
    assert told["encodes"] == {"speaker": 1, "codec": 0}
    assert told["tiers"]["memory"]["entries"] == 1


async def test_uploads_that_wait_for_the_disk_stop_nothing_but_uploads(
    rig, monkeypatch
):
    """Six uploads that waited for a lock took all threads of asyncio's pool."""
    await rig.register(ref_text="words")
    gate = threading.Event()

    def held(new, audio, *, limits, register=rig.store.register):
        assert gate.wait(30)
        return register(new, audio, limits=limits)

    monkeypatch.setattr(rig.store, "register", held)
    waiting = [
        asyncio.create_task(rig.register(f"v{number}", pitch_hz=200 + number))
        for number in range(34)
    ]
    await asyncio.sleep(0)
    try:
        with pytest.raises(ServerBusyError):
            await rig.register("one too many")
        # Speech goes on: a look-up, an encode, a thread of the default pool.
        assert await asyncio.wait_for(rig.precompute(), 20) is False
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5) == "free"
    finally:
        gate.set()
    await asyncio.gather(*waiting)


@dataclass
class Part:
    """Of a prompt, as large as it says."""

    num_bytes: int


async def test_what_prompts_begin_with_takes_16_mib_at_most(rig):
    async def build():
        return Part(1024**2)

    for number in range(40):
        await rig.service.prompts.get_or_build(number, "a", build)
    assert 15 * 1024**2 < rig.service.prompts.num_bytes <= 16 * 1024**2


# -------- models that we do not serve


@pytest.mark.parametrize("engine", ["of another family", None])
async def test_voices_are_kept_for_a_model_that_we_do_not_serve(tmp_path, engine):
    client = None if engine is None else InProcessEngine(worker(object()))
    served = model(None, "nothing to precompute")
    service = open_service(Settings(samples_dir=tmp_path), client, served)
    service.start()
    done = await service.register_audio(ALONE, upload(), wav(), precompute=True)
    found = await service.lookups.get(ALONE, "Ann")
    assert found.record == done.record
    assert await service.encodings.status(found) == (
        "unsupported",
        "nothing to precompute",
    )
    with pytest.raises(CannotCloneError, match="nothing to precompute"):
        await service.encodings.precompute(found, force=True)
    stats = await service.stats(Caller(tenant=ALONE))
    assert (stats["registry"], stats["workers"]) == ({"speakers": 1}, [])
    await service.deletions.delete("Ann", ALONE.name)
    assert await service.lookups.find(ALONE, "Ann") is None
    assert service.store.verify() == []
    assert client is None or client.calls == []
    service.shutdown()


async def test_a_server_is_ready_once_its_workers_have_said_what_they_have(tmp_path):
    rig = Rig(tmp_path)
    assert not rig.service.encodings.knows_encoders
    await soon(lambda: rig.service.encodings.knows_encoders)
    await rig.close()


async def test_a_worker_on_another_directory_is_named_at_the_start(
    tmp_path, plugin_log
):
    encoder = SpectrumEncoder("speaker")
    speakers = worker_speakers(tmp_path / "there", [encoder])
    engine = InProcessEngine(worker_with(speakers))
    settings = Settings(samples_dir=tmp_path / "here")
    service = open_service(settings, engine, model(default_family()))
    service.start()
    for _ in range(2):
        await service.encodings.settled()
        # And asks once more, without a word.
        assert not service.encodings.knows_encoders
    await service.encodings.settled()
    (line,) = [r for r in plugin_log.records if r.levelname == "ERROR"]
    for told in (tmp_path / "here", tmp_path / "there", "SPEAKER_SAMPLES_DIR"):
        assert str(told) in line.getMessage()
    with pytest.raises(ForeignStoreError, match="no voice can be cloned"):
        await service.encodings.ensurer.fingerprints()
    service.shutdown()
    speakers.close()


async def test_a_service_that_is_shut_down_leaves_no_thread_and_no_descriptor(tmp_path):
    async def live():
        rig = Rig(tmp_path)
        await rig.register(precompute=True)
        await rig.settled()
        await rig.service.stats(Caller(tenant=ALONE))
        await rig.service.deletions.delete("Ann", ALONE.name)
        await rig.close()

    def held():
        gc.collect()
        ours = [t for t in threading.enumerate() if t.name.startswith("tts-cache")]
        opened = [
            str(path.readlink())
            for path in Path("/proc/self/fd").iterdir()
            if path.is_symlink()
        ]
        # A worker keeps this one as long as its process lives.
        return len(ours), sum("turns.lock" not in path for path in opened)

    await live()
    threads, descriptors = held()
    for _ in range(3):
        await live()
    for _ in range(100):  # threads end when they have done what they had in hand
        if held()[0] <= threads:
            break
        await asyncio.sleep(0.05)
    assert held()[0] <= threads
    assert held()[1] <= descriptors
