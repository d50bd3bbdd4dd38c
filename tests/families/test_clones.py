"""A checkpoint that cannot clone says so, in one text wherever it is asked to."""

import pkgutil
from types import SimpleNamespace

import msgspec
import pytest

from tests import speaking
from tests.families.cases import case_of
from tests.families.serving import message
from tests.in_process_workers import (
    InProcessEngine,
    SpectrumEncoder,
    SyncInProcessEngine,
    clip,
    decoded,
    new_speaker,
    worker,
)
from tests.speech_server import Server, running
from vllm_tts_cache.catalogue.records import NewSpeaker
from vllm_tts_cache.entrypoints.cli import models
from vllm_tts_cache.errors import CheckpointError, ConfigError
from vllm_tts_cache.model_executor import rpc_methods
from vllm_tts_cache.model_executor.talker import CachedTalker
from vllm_tts_cache.offline import OfflineSpeakers
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.family import Family, families

VOICES = "/v1/audio/voices"
# Nobody listens there: a request that is refused fetches nothing.
NOWHERE = "http://127.0.0.1:9/clip.wav"


def refusing_checkpoints():
    for family in families():
        for kind, write in case_of(family).refusing.items():
            yield pytest.param((family, write), id=f"{family.name}, {kind}")


@pytest.fixture(params=refusing_checkpoints())
def refusing(request, tiny, tmp_path):
    """A family, a checkpoint of it that clones nothing, and the reason."""
    family, write = request.param
    checkpoint = tmp_path / "checkpoint"
    write(checkpoint, tiny)
    reason = family.clones(checkpoint)
    assert reason, "it does clone"
    return SimpleNamespace(family=family, checkpoint=checkpoint, reason=reason)


@pytest.fixture
async def server(refusing, tmp_path, monkeypatch):
    places = refusing.checkpoint, tmp_path / "speakers", monkeypatch
    encoders = [SpectrumEncoder("of nobody")]
    server = Server(*places, family=refusing.family, encoders=encoders)
    server.engine.workers = (worker(talker(refusing)),)
    async with running(server) as server:
        yield server
        assert server.engine.prompts == []
        assert server.service.store.verify() == []


def talker(refusing):
    """What the worker runs, as it is when the host has loaded its weights."""
    for path in refusing.family.models.values():
        model = pkgutil.resolve_name(path)
        if issubclass(model, CachedTalker):
            loaded = model.__new__(model)
            at = SimpleNamespace(model=str(refusing.checkpoint), revision=None)
            loaded._load_speakers(SimpleNamespace(model_config=at))
            return loaded
    return None  # the host's own


def test_each_family_that_knows_such_checkpoints_is_tested_on_them():
    for each in families():
        knows_some = each.clones is not Family.clones
        assert bool(case_of(each).refusing) == knows_some, each.name


def stored_files(server):
    return [p for p in server.directory.glob("store/**/*.safetensors") if p.is_file()]


async def test_registering_is_refused_and_nothing_is_stored(server, refusing):
    raw = {"name": "Ann", "consent": "yes", "speaker_embedding": "[0.5, 1.0]"}
    answers = [
        await server.register(
            "Ann", speaking.wav(), ref_text="words", precompute="true"
        ),
        await server.register("Ann", b"no audio at all"),
        await server.client.post(VOICES, data=raw),
    ]
    assert [message(answer) for answer in answers] == [refusing.reason] * 3
    await server.settled()
    assert server.service.store.num_speakers() == 0
    assert stored_files(server) == []
    assert server.engine.calls == []


@pytest.mark.parametrize("ref_audio", [speaking.data_url(), NOWHERE, "no URL"])
async def test_speech_with_reference_audio_is_refused(server, refusing, ref_audio):
    presets = sorted(server.handler.builtin_names)[:1]
    for voice in (None, "nobody", "default", *presets):
        fields = {"voice": voice, "ref_audio": ref_audio, "ref_text": "words"}
        for speak in (speaking.plainly, speaking.as_raw_stream, speaking.as_events):
            assert message(await speak(server, **fields)) == refusing.reason
        for tell in (speaking.in_a_batch, speaking.by_websocket):
            assert refusing.reason in str(await tell(server, **fields))
    raw = await server.speak(speaker_embedding=[0.5] * 8)
    assert message(raw) == refusing.reason
    assert stored_files(server) == []
    assert server.engine.calls == []


@pytest.mark.parametrize("kind", ["audio", "embedding"])
async def test_another_models_voice_stays_and_says_why(server, refusing, kind):
    """Servers of several models may share one directory."""
    if kind == "audio":
        audio = clip()
        server.service.store.registrations.register(
            new_speaker("Ann", audio), decoded(audio)
        )
    else:
        raw = NewSpeaker(name="Ann", consent="given", embedding=(0.5, 1.0))
        server.service.store.registrations.register(raw, None)
    for way in ("", "?force=true"):
        answer = await server.client.post(f"{VOICES}/Ann/cache{way}")
        assert message(answer) == refusing.reason
    for path in (f"{VOICES}/Ann", f"{VOICES}/Ann/cache"):
        shown = (await server.client.get(path)).json()
        assert shown["cache_status"] == "unsupported"
        assert shown["error"] == refusing.reason
    assert message(await server.speak(voice="Ann")) == refusing.reason
    assert server.engine.calls == []
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 200


def test_the_worker_says_the_same_and_loads_no_encoders(refusing):
    if (model := talker(refusing)) is None:
        pytest.skip("no worker class of ours: the host's own runs")
    assert model.tts_cache_speakers is None
    for method in rpc_methods.METHODS:
        [[answer]] = InProcessEngine(worker(model)).called(method.__name__)
        unsupported = msgspec.msgpack.decode(answer, type=wire.Unsupported)
        assert unsupported.reason == refusing.reason


def test_a_batch_job_and_the_command_line_say_the_same(refusing, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path / "speakers"))
    with pytest.raises(ConfigError) as batch:
        OfflineSpeakers(SyncInProcessEngine(model=str(refusing.checkpoint)))
    arguments = ["--model", refusing.checkpoint, "--out", tmp_path / "out.safetensors"]
    with pytest.raises(CheckpointError) as command:
        models.encode_app([*map(str, arguments), "clip.wav"], standalone_mode=False)
    for told in (batch, command):
        assert str(told.value).endswith(f": {refusing.reason}")
    assert not (tmp_path / "speakers").exists()
