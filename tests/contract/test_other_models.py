"""Models of the host's that we do not serve: passed through, and clients are told so.

Over the host's own list of adapters, so that a model that is new in it is noticed here:
it becomes a family, or is described in `other_models`.
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from vllm_omni.entrypoints.openai.tts_adapters import TTS_ADAPTER_REGISTRY
from vllm_omni.utils.speaker_cache import get_speaker_cache

from tests import store_samples
from tests.families.serving import message
from tests.in_process_workers import worker
from tests.speaking import wav
from tests.speech_server import Server, running
from tests.store_samples import voice
from vllm_tts_cache.audio.decode import decode_clips
from vllm_tts_cache.catalogue.records import NewSpeaker
from vllm_tts_cache.entrypoints.serving import host_speakers
from vllm_tts_cache.entrypoints.serving.adapter import CachedAdapter
from vllm_tts_cache.entrypoints.serving.host_speakers import OTHER_MODELS, of_model
from vllm_tts_cache.speaker.family import families

VOICES = "/v1/audio/voices"
OURS = {family.part("adapter").name for family in families()}
OTHERS = sorted(set(TTS_ADAPTER_REGISTRY) - OURS)
NEW_IN_0_32 = {"auk", "fish_omni_tts", "yue2"}


def glm(checkpoint, directory, monkeypatch):
    """Serves the model that is set; what it loads of a checkpoint is never read."""
    server = Server(checkpoint, directory, monkeypatch, stage="glm_tts")
    server.engine.workers = (worker(object()),)
    return server


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(glm(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


def serve(server, name):
    """Have the host serve this model; returns its adapter."""
    server.handler._tts_model_type = name
    return server.handler._get_tts_adapter()


def test_every_model_of_the_host_is_a_family_or_is_described():
    described = set(OTHER_MODELS)
    assert described | OURS >= set(TTS_ADAPTER_REGISTRY), "the host has a new model"
    known = set(TTS_ADAPTER_REGISTRY) | NEW_IN_0_32
    assert described <= known, "the host has it no more"
    assert not described & OURS, "it is a family by now"


async def test_a_clip_is_stored_only_if_the_host_speaks_with_it(server):
    store = server.service.store
    for name in OTHERS:
        adapter = serve(server, name)
        told = of_model(name, adapter)
        assert type(adapter) is TTS_ADAPTER_REGISTRY[name]
        assert not isinstance(adapter, CachedAdapter)
        assert server.handler.served_family is None
        assert server.handler.refusal is None
        answer = await server.register("Ann", wav(), precompute="true")
        if told.takes_clips:
            await is_kept_for_the_host(server, answer, told.note)
        else:
            assert message(answer) == told.note
        assert store.num_speakers() == 0
        assert list(server.directory.glob("store/**/*.safetensors")) == []
    assert server.engine.calls == []
    assert store.verify() == []


async def is_kept_for_the_host(server, answer, note):
    """And is deleted again."""
    assert answer.status_code == 200, answer.text
    assert answer.json()["note"] == note
    assert (await server.handler._read_voice("Ann")).row is not None
    for path in (f"{VOICES}/Ann", f"{VOICES}/Ann/cache"):
        shown = (await server.client.get(path)).json()
        assert (shown["cache_status"], shown["error"]) == ("unsupported", note)
    forced = await server.client.post(f"{VOICES}/Ann/cache?force=true")
    assert message(forced) == note
    stats = (await server.client.get("/v1/audio/speaker_cache")).json()
    assert (stats["workers"], stats["registry"]) == ([], {"speakers": 1})
    for status in (200, 404):
        answer = await server.client.delete(f"{VOICES}/Ann")
        assert answer.status_code == status


async def test_an_embedding_is_stored_only_if_the_host_speaks_with_it(server):
    for name in OTHERS:
        serve(server, name)
        answer = await server.embed("Raw", speaker_embedding=str([0.5] * 192))
        if OTHER_MODELS[name].takes_embeddings:
            assert answer.status_code == 200, answer.text
            assert (await server.handler._read_voice("raw")).embedding == [0.5] * 192
            await server.client.delete(f"{VOICES}/Raw")
        else:
            assert OTHER_MODELS[name].title in message(answer)
        assert server.service.store.num_speakers() == 0


async def test_a_voice_of_several_clips_is_not_handed_to_the_host_as_one(server):
    """It was registered in this directory while a model that takes them was served."""
    serve(server, "glm_tts")
    audio = decode_clips([wav(), wav(pitch_hz=330)])
    new = voice("Ann", audio, clip_starts=audio.audio.clip_starts)
    server.service.store.registrations.register(new, audio)
    said = "there are 2 clips, and this model takes one clip"
    assert said in message(await server.speak(voice="Ann", ref_text="one\ntwo"))
    shown = (await server.client.get(f"{VOICES}/Ann")).json()
    assert shown["cache_status"] == "unsupported" and said in shown["error"]


@pytest.fixture
async def far_server(default_checkpoint, tmp_path, monkeypatch, postgres):
    """Its catalogue is a database behind a network."""
    monkeypatch.setattr(store_samples, "catalogue_url_of", postgres.url_of)
    monkeypatch.setenv("SPEAKER_CATALOGUE_URL", postgres.url_of(tmp_path))
    async with running(glm(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server
    postgres.tidy()


@pytest.fixture
def looked_up(far_server, monkeypatch):
    """In which threads voices were looked up, and read."""
    threads, store = set(), far_server.service.store

    def told(call):
        def tell(*args):
            threads.add(threading.current_thread())
            return call(*args)

        return tell

    for name in ("find", "read_audio", "speaker_embedding"):
        monkeypatch.setattr(store, name, told(getattr(store, name)))
    return threads


async def test_the_event_loop_waits_for_no_database(far_server, looked_up):
    """It asked for each voice a few times, whoever else spoke."""
    serve(far_server, "glm_tts")
    for name in ("Ann", "Bob"):
        fields = {"ref_text": f"{name}'s words"}
        assert (await far_server.register(name, wav(), **fields)).status_code == 200
    looked_up.clear()
    assert (await far_server.speak(voice="ANN")).status_code == 200
    items = [{"input": "One.", "voice": "Bob"}, {"input": "Two."}]
    batch = {"items": items, "voice": "Ann"}
    answer = await far_server.client.post("/v1/audio/speech/batch", json=batch)
    assert answer.json()["succeeded"] == 2, answer.text
    prompts = far_server.engine.prompts
    texts = [prompt["mm_processor_kwargs"]["prompt_text"] for prompt in prompts]
    spoken, *of_batch = texts  # whose items are spoken beside one another
    assert (spoken, sorted(of_batch)) == ("Ann's words", ["Ann's words", "Bob's words"])
    unknown = await far_server.speak(voice="Eve")
    assert "Unknown voice 'Eve'" in message(unknown)
    assert "requires 'ref_audio'" in message(await far_server.speak(voice="default"))
    assert looked_up and threading.main_thread() not in looked_up


async def test_a_database_that_is_down_is_a_503_there_as_well(far_server, postgres):
    serve(far_server, "glm_tts")
    fields = {"ref_text": "words"}
    assert (await far_server.register("Ann", wav(), **fields)).status_code == 200
    postgres.stop()
    try:
        answer = await far_server.speak(voice="Ann")
    finally:
        postgres.start()
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["Retry-After"]) > 0


async def test_moss_speaks_with_the_clip_of_a_registered_voice(server, monkeypatch):
    """vLLM-Omni 0.32 binds a voice to its file, and reads it once for a generation."""
    moss = pytest.importorskip("vllm_omni.entrypoints.openai.tts_adapters.moss_tts")
    adapter, encoded = serve(server, "moss_tts"), []
    if not hasattr(adapter, "_bind_registered_reference"):
        pytest.skip("since 0.32")

    class Encoder:
        async def encode(self, name, *, resolve_ref_audio, voice_created_at, **_):
            samples, rate_hz, key = await resolve_ref_audio(name)
            encoded.append((voice_created_at, len(samples), rate_hz))
            return torch.ones(2, 2), key

    adapter._moss_variant, adapter._moss_ref_encoder = "realtime", Encoder()
    adapter._get_moss_realtime_components = lambda: (None, None, None)
    monkeypatch.setattr(moss, "build_realtime_prompt", lambda *_: {})
    for pitch_hz in (220, 330):
        clip = wav(pitch_hz=pitch_hz)
        assert (await server.register("Ann", clip, ref_text="words")).is_success
        answer = await server.speak(voice="ANN")
        assert answer.status_code == 200, answer.text
    assert encoded[0][0] < encoded[1][0] and encoded[0][1:] == (48_000, 24_000)
    assert server.engine.prompts[-1]["additional_information"]["voice_name"] == ["ann"]
    await server.client.delete(f"{VOICES}/Ann")
    assert "requires 'ref_audio'" in message(await server.speak(voice="Ann"))
    assert len(encoded) == 2


@pytest.mark.parametrize("variant", ["sound_effect", "voice_generator"])
async def test_mosss_checkpoints_that_take_no_clip_store_none(server, variant):
    serve(server, "moss_tts")._moss_variant = variant
    assert "MOSS-TTS" in message(await server.register("Ann", wav()))
    assert server.service.store.num_speakers() == 0


async def test_a_model_that_nobody_described_is_left_to_the_host(server):
    """A newer host may have it: what it takes is not ours to say."""
    unknown = of_model("of tomorrow")
    assert unknown.takes_clips and unknown.takes_embeddings
    assert unknown.note.startswith("This model")


async def test_the_host_reads_voices_through_us(server):
    await server.register("Ann", wav(), ref_text="words")
    raw = NewSpeaker(name="Raw", consent="y", embedding=(0.5, -1.0))
    server.service.store.registrations.register(raw, None)
    handler = server.handler
    names = ("Ann", "Raw", "nobody")
    voices = {name.lower(): await handler._read_voice(name) for name in names}
    with host_speakers.known(voices):
        assert set(handler.uploaded_speakers) == {"ann", "raw"}
        assert "ann" in handler._get_available_speakers()
        info = handler.uploaded_speakers["ann"]
        assert Path(info["file_path"]).exists()
        samples, rate_hz = handler._load_uploaded_audio("Ann")
        assert (samples.shape, rate_hz) == ((48_000,), 24_000)
        url = handler._get_uploaded_audio_data("Ann")
        assert url.startswith("data:audio/wav;base64,")
        assert handler._load_uploaded_audio("nobody") is None
        assert handler._get_uploaded_speaker_embedding("raw") == [0.5, -1.0]
        assert handler._get_uploaded_speaker_embedding("ann") is None
        assert handler._load_uploaded_audio("raw") is None
        # As vLLM-Omni 0.32 reads it for MOSS-TTS.
        ann, raw = (SimpleNamespace(name=name) for name in ("ann", "raw"))
        assert handler._load_registered_reference(ann)[1] == 24_000
        with pytest.raises(ValueError, match="'raw' has no audio"):
            handler._load_registered_reference(raw)


async def test_what_the_host_keeps_of_a_voice_goes_with_it(server):
    """Its embedding was still in this process's memory after the 200."""
    adapter = serve(server, "glm_tts")
    assert adapter is not None
    await server.register("Ann", wav())
    cache = get_speaker_cache()
    key = cache.make_cache_key("Ann", "glm_tts", 1)
    cache.put(key, {"embedding": torch.ones(1, 192)})
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 200
    assert cache.get(key) is None


async def test_stocks_files_are_read_once(default_checkpoint, tmp_path, monkeypatch):
    """vLLM-Omni 0.32 looks for new ones before each request, and keeps rows of them."""

    def write(name):
        fields = {"name": name, "voice_name_lower": name.lower(), "consent": "y"}
        fields |= {"created_at": "1000", "mime_type": "audio/wav", "file_size": "1"}
        fields |= {"original_filename": "a.wav", "embedding_source": "audio"}
        fields |= {"sample_rate": "24000", "ref_text": "Hello there."}
        noise = {"audio": torch.rand(48_000) - 0.5}
        save_file(noise, tmp_path / f"{name}_y_1000.safetensors", metadata=fields)

    write("Ann")
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        assert (await server.speak(voice="Ann")).status_code == 200
        write("Bob")
        assert (await server.speak(voice="Ann")).status_code == 200
        assert "Bob" in message(await server.speak(voice="Bob"))
