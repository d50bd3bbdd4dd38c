import gc
import threading
from pathlib import Path

import pytest

from tests.in_process_workers import (
    InProcessEngine,
    SpectrumEncoder,
    worker_speakers,
    worker_with,
)
from tests.speaking import wav
from tests.store_samples import settings_of
from tests.waiting import settled, soon
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers import registering
from vllm_tts_cache.entrypoints.speakers.registering import Upload
from vllm_tts_cache.entrypoints.speakers.served_model import ServedModel
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.speaker.rpc_client import ForeignStoreError
from vllm_tts_cache.tenants import ALONE, Caller

NAMES = ("speaker", "codec")


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
        self.service = SpeakerService(settings, self.engine, served)
        self.service.start()
        self.store = self.service.store

    async def register(self, name="Ann", *, precompute=False, ref_text=None, **clip):
        new = await self.service.uploads.register_audio(
            ALONE, upload(name, ref_text, precompute=precompute), wav(**clip)
        )
        self.service.registered(new.done)
        return new.done.record

    async def precompute(self, name="Ann", *, force=False):
        found = await self.service.lookups.get(ALONE, name)
        return await self.service.encodings.precompute(found, force=force)

    async def ready(self, name="Ann", **clip):
        """Register a voice, and have it encoded."""
        record = await self.register(name, **clip)
        await self.precompute(name)
        return record

    async def status(self, name="Ann"):
        found = await self.service.lookups.get(ALONE, name)
        return (await self.service.encodings.status(found))[:2]

    async def settled(self):
        await settled(self.service.encodings)
        # Bounded: a test that failed half-way may have left a participant behind.
        await soon(lambda: not self.store.num_unfinished_deletions())

    @property
    def encodes(self):
        return self.speakers.stats().encodes

    async def close(self):
        for encoder in self.encoders:
            encoder.gate.set()
        try:
            await self.settled()
        finally:
            self.service.shutdown()
            self.speakers.close()


@pytest.fixture
async def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    await made.close()


@pytest.mark.parametrize("data", [b"", b"garbage", wav(seconds=0.5), wav(peak=0.0)])
async def test_a_failed_upload_leaves_the_speaker_as_it_was(rig, data):
    old = await rig.ready()
    with pytest.raises(InvalidAudioError):
        await rig.service.uploads.register_audio(ALONE, upload(), data)
    assert (await rig.service.lookups.get(ALONE, "Ann")).record == old
    assert await rig.status() == ("ready", None)
    assert rig.store.verify() == []


async def test_a_wrong_field_is_refused_before_anything_is_decoded(rig, monkeypatch):
    monkeypatch.setattr(registering, "decode", None)
    too_long = [("ref_text", 2001), ("description", 2001), ("mime_type", 128)]
    too_long += [("original_filename", 256)]
    wrong = [upload(**{field: length * "x"}) for field, length in too_long]
    unsigned = Upload(name="Ann", consent=513 * "x")
    for each in (upload(""), upload("default"), unsigned, *wrong):
        with pytest.raises(InvalidSpeakerError):
            await rig.service.uploads.register_audio(ALONE, each, wav())
    assert rig.store.num_speakers() == 0


async def test_a_server_is_ready_once_its_workers_have_said_what_they_have(tmp_path):
    rig = Rig(tmp_path)
    assert not rig.service.encodings.knows_encoders
    await soon(lambda: rig.service.encodings.knows_encoders)
    await rig.close()


async def test_a_worker_on_another_directory_is_named_at_start(tmp_path, plugin_log):
    encoder = SpectrumEncoder("speaker")
    speakers = worker_speakers(tmp_path / "there", [encoder])
    engine = InProcessEngine(worker_with(speakers))
    settings = Settings(samples_dir=tmp_path / "here")
    service = SpeakerService(settings, engine, model(default_family()))
    service.start()
    for _ in range(2):
        await settled(service.encodings)
        # And asks once more, without a word.
        assert not service.encodings.knows_encoders
    await settled(service.encodings)
    (line,) = [r for r in plugin_log.records if r.levelname == "ERROR"]
    for told in (tmp_path / "here", tmp_path / "there", "SPEAKER_SAMPLES_DIR"):
        assert str(told) in line.getMessage()
    with pytest.raises(ForeignStoreError, match="no voice can be cloned"):
        await service.encodings.fingerprints()
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
        links = (path for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        opened = [str(path.readlink()) for path in links]
        # A worker keeps this one as long as its process lives.
        return len(ours), sum("turns.lock" not in path for path in opened)

    await live()
    threads, descriptors = held()
    for _ in range(3):
        await live()
    # Threads end when they have done what they had in hand.
    await soon(lambda: held()[0] <= threads)
    assert held()[1] <= descriptors
