"""The host's diffusion models that we do not serve keep no voice that none can use.

The host calls each of them OmniVoice, and gives each the prompt that OmniVoice reads.
"""

from pathlib import Path

import pytest
from vllm_omni.diffusion import registry

from tests.families.serving import message
from tests.in_process_workers import worker
from tests.speaking import wav
from tests.speech_server import Server, running
from tests.store_samples import voice
from vllm_tts_cache.audio.decode import decode_clips
from vllm_tts_cache.speaker.family import families, family_of_model

VOICES = "/v1/audio/voices"
MODELS = Path(registry.__file__).parent / "models"
OURS = next(family for family in families() if family.pipelines)

PATHS = {
    name: MODELS / folder / f"{module}.py"
    for name, (folder, module, _) in registry._DIFFUSION_MODELS.items()
    if family_of_model(name) is None
}
SAYS_THAT_IT_SPEAKS = ("support_audio_output", "SupportAudioOutput")
# Those that the host can answer a speech request with; and one of films.
AUDIBLE = sorted(
    name
    for name, path in PATHS.items()
    if any(said in path.read_text() for said in SAYS_THAT_IT_SPEAKS)
)


@pytest.fixture
async def server(tiny, tmp_path, monkeypatch):
    server = Server(tiny(OURS), tmp_path, monkeypatch, family=OURS)
    server.engine.workers = (worker(object()),)
    async with running(server) as server:
        yield server


def serve(server, name):
    """Have the host serve this pipeline."""
    server.engine.architecture = name
    server.handler._diffusion_adapter = None


async def test_neither_a_clip_nor_an_embedding_is_stored(server):
    for name in (*AUDIBLE, "WanPipeline"):
        serve(server, name)
        assert server.handler.served_family is None
        assert (await server.speak()).status_code == 200
        said = f"{name} speaks with no voice that is registered by a clip"
        assert said in message(await server.register("Ann", wav(), precompute="true"))
        raw = {"name": "Raw", "consent": "y", "speaker_embedding": str([0.5] * 192)}
        assert said in message(await server.client.post(VOICES, data=raw))
        assert server.service.store.num_speakers() == 0
        assert list(server.directory.glob("store/**/*.safetensors")) == []


async def test_a_voice_of_another_model_is_said_to_be_not_spoken_here(server):
    """Servers of several models may share one directory."""
    serve(server, "StableAudioPipeline")
    audio = decode_clips([wav()])
    server.service.store.registrations.register(voice("Ann", audio), audio)
    said = "StableAudioPipeline speaks with no voice"
    shown = (await server.client.get(f"{VOICES}/Ann/cache")).json()
    assert shown["cache_status"] == "unsupported" and said in shown["error"]
    assert said in message(await server.client.post(f"{VOICES}/Ann/cache"))


@pytest.mark.parametrize("name", ["PipelineOfTomorrow", None])
async def test_a_pipeline_of_a_plugin_is_left_to_the_host(server, monkeypatch, name):
    """It may read what the host puts into its prompt, and a name may be unknown."""
    brought = ("plugin.pipeline", "", "Pipeline")  # as the host's own hook has it
    monkeypatch.setitem(registry._DIFFUSION_MODELS, name, brought)
    serve(server, name)
    assert (await server.register("Ann", wav())).status_code == 200
    answer = await server.client.post(f"{VOICES}/Ann/cache")
    assert "nothing to precompute" in message(answer)
    shown = (await server.client.get(f"{VOICES}/Ann")).json()
    assert shown["cache_status"] == "unsupported"
    assert (await server.client.get("/v1/audio/speaker_cache")).status_code == 200
    for status in (200, 404):
        assert (await server.client.delete(f"{VOICES}/Ann")).status_code == status
