"""Voxtral requests through the host's real routes, serving class and adapter."""

import shutil
from typing import Any

import huggingface_hub
import pytest

from tests import in_process_workers
from tests.contract.test_speech import by_websocket, data_url, in_a_batch, wav
from tests.families.voxtral.tiny_checkpoint import PRESETS
from tests.in_process_workers import SpectrumEncoder, worker
from tests.speech_server import Server, running
from vllm_tts_cache.families.voxtral.family import FAMILY

AUDIO, NEXT_TEXT = 24, 36
REFUSAL = "This Voxtral checkpoint has no reference encoder"


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """Serve a checkpoint, by the host's own worker class."""

    def serve(checkpoint, **model_config):
        server = Server(
            checkpoint,
            tmp_path,
            monkeypatch,
            family=FAMILY,
            encoders=[SpectrumEncoder("of nobody")],
        )
        server.engine.workers = (worker(None),)
        vars(server.engine.model_config).update(
            skip_tokenizer_init=False,
            tokenizer=str(checkpoint),
            tokenizer_mode="mistral",
            tokenizer_revision=None,
            runner_type="generate",
            trust_remote_code=False,
            **model_config,
        )
        has_encoder = FAMILY.clones(checkpoint) is None
        monkeypatch.setitem(
            in_process_workers.METHODS, "encoder_loaded", lambda _worker: has_encoder
        )
        return running(server)

    return serve


@pytest.fixture
async def server(serving, voxtral_checkpoint):
    async with serving(voxtral_checkpoint) as server:
        yield server


@pytest.fixture
async def with_encoder(serving, voxtral_with_encoder):
    async with serving(voxtral_with_encoder) as server:
        yield server


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def stocks(server, **fields):
    """The prompt that the host builds by itself."""
    from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
    from vllm_omni.entrypoints.openai.tts_adapters.voxtral import VoxtralTTSAdapter

    own: Any = VoxtralTTSAdapter(server.handler._get_tts_adapter().ctx)
    own._encoder_loaded = True
    return own._build_prompt(OpenAICreateSpeechRequest(input="Hello.", **fields))


@pytest.mark.parametrize("name", PRESETS)
async def test_presets_speak_as_without_us(server, name):
    for voice in (name, name.upper()):
        assert (await server.speak(voice=voice)).status_code == 200
    prompts = server.engine.prompts
    assert prompts == [stocks(server, voice=name)] * 2
    ids = prompts[0]["prompt_token_ids"]
    assert ids.count(AUDIO) == PRESETS[name] and NEXT_TEXT in ids
    assert await in_a_batch(server, voice=name) is None
    assert await by_websocket(server, voice=name) is None


async def test_presets_are_listed_and_their_names_reported_as_no_clone(server):
    listed = (await server.client.get("/v1/audio/voices")).json()
    assert listed["voices"] == sorted([*PRESETS, "default"])
    spoken = await server.speak(voice="fr_male")
    assert spoken.headers["X-Speaker-Cache"] == "none"


@pytest.mark.parametrize("voice", [None, *PRESETS, "nobody"])
async def test_reference_audio_is_refused_and_never_a_preset_in_its_place(
    server, voice
):
    """The host speaks with the preset, as if no audio had been sent."""
    refused = message(await server.speak(voice=voice, ref_audio=data_url()))
    assert refused.startswith(REFUSAL)
    for name in PRESETS:
        assert name in refused
    assert server.engine.prompts == []


async def test_a_voice_that_is_no_preset_is_answered_with_the_presets(server):
    assert message(await server.speak(voice="nobody")).startswith(REFUSAL)


async def test_what_the_host_refuses_it_refuses_in_its_own_words(server):
    assert "Either 'voice'" in message(await server.speak())
    assert "Either 'voice'" in message(await server.speak(voice="default"))
    assert "empty" in message(await server.speak(voice="fr_male", input=" "))


@pytest.mark.parametrize("model", ["a directory", "nobody/has-it-here"])
async def test_where_the_weights_are_elsewhere_the_host_decides(
    serving, voxtral_checkpoint, tmp_path, monkeypatch, plugin_log, model
):
    """The API process may have no more than the config and the tokenizer."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if model == "a directory":
        model = str(tmp_path)
        shutil.copy(voxtral_checkpoint / "params.json", tmp_path)
    async with serving(voxtral_checkpoint, model=model) as server:
        assert (await server.speak(voice="fr_male")).status_code == 200
        refused = message(await server.speak(ref_audio=data_url()))
        assert "requires the full Voxtral checkpoint" in refused
    told = [r.getMessage() for r in plugin_log.records if "clones" in r.getMessage()]
    assert len(told) == (model == "nobody/has-it-here")


# -------- with the reference encoder


async def test_with_the_encoder_everything_is_the_hosts(with_encoder):
    server = with_encoder
    url = data_url()
    for fields in ({"voice": "fr_male"}, {"ref_audio": url}):
        assert (await server.speak(**fields)).status_code == 200
        ours, theirs = server.engine.prompts[-1], stocks(server, **fields)
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
        assert ours.keys() == theirs.keys()
    [(samples, rate_hz)] = server.engine.prompts[-1]["multi_modal_data"]["audio"]
    assert (len(samples), rate_hz) == (48_000, 24_000)
    assert "nobody" in message(await server.speak(voice="nobody"))


async def test_with_the_encoder_voices_are_stored_and_not_encoded(with_encoder):
    server = with_encoder
    assert (await server.register("Ann", wav(), precompute="true")).status_code == 200
    await server.settled()
    shown = (await server.client.get("/v1/audio/voices/Ann")).json()
    assert shown["cache_status"] == "unsupported"
    forced = await server.client.post("/v1/audio/voices/Ann/cache")
    assert "nothing to precompute" in message(forced)
    assert not any(call.startswith("tts_cache_") for call in server.engine.calls)
