"""Voxtral requests through the host's real routes, serving class and adapter."""

import json
from typing import Any

import huggingface_hub
import pytest

from tests import in_process_workers
from tests.families.serving import message
from tests.families.voxtral import tiny_checkpoint
from tests.in_process_workers import SpectrumEncoder, worker
from tests.speaking import by_websocket, data_url, in_a_batch, wav
from tests.speech_server import Server, running
from vllm_tts_cache.families.voxtral.family import FAMILY

AUDIO, NEXT_TEXT = 24, 36


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """Serve a checkpoint, by the host's own worker class."""

    def serve(*, with_encoder=False, **model_config):
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        tiny_checkpoint.write_voxtral_checkpoint(checkpoint, with_encoder=with_encoder)
        encoders = [SpectrumEncoder("of nobody")]
        places = checkpoint, tmp_path, monkeypatch
        server = Server(*places, family=FAMILY, encoders=encoders)
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
        methods = in_process_workers.METHODS
        monkeypatch.setitem(methods, "encoder_loaded", lambda _worker: with_encoder)
        return running(server)

    return serve


def stocks(server, **fields):
    """The prompt that the host builds by itself."""
    from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
    from vllm_omni.entrypoints.openai.tts_adapters.voxtral import VoxtralTTSAdapter

    own: Any = VoxtralTTSAdapter(server.handler._get_tts_adapter().ctx)
    own._encoder_loaded = True
    return own._build_prompt(OpenAICreateSpeechRequest(input="Hello.", **fields))


async def test_presets_speak_as_without_us_and_nobody_else_does(serving):
    """Clips are refused as in `test_clones`."""
    async with serving() as server:
        for name, num_rows in tiny_checkpoint.PRESETS.items():
            for voice in (name, name.upper()):
                spoken = await server.speak(voice=voice)
                assert spoken.headers["X-Speaker-Cache"] == "none", spoken.text
                prompt = server.engine.prompts[-1]
                assert prompt == stocks(server, voice=name)
                ids = prompt["prompt_token_ids"]
                assert ids.count(AUDIO) == num_rows and NEXT_TEXT in ids
        for speak in (in_a_batch, by_websocket):
            assert await speak(server, voice="fr_male") is None
        listed = (await server.client.get("/v1/audio/voices")).json()
        assert listed["voices"] == sorted([*tiny_checkpoint.PRESETS, "default"])
        assert "no reference encoder" in message(await server.speak(voice="nobody"))
        assert "Either 'voice'" in message(await server.speak())


@pytest.mark.parametrize("model", ["a directory", "nobody/has-it-here"])
async def test_where_the_weights_are_elsewhere_the_host_decides(
    serving, tmp_path, monkeypatch, plugin_log, model
):
    """The API process may have no more than the config and the tokenizer."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "params.json").write_text(json.dumps(tiny_checkpoint.PARAMS))
    given = str(tmp_path) if model == "a directory" else model
    async with serving(model=given) as server:
        assert (await server.speak(voice="fr_male")).status_code == 200
        refused = message(await server.speak(ref_audio=data_url()))
        assert "requires the full Voxtral checkpoint" in refused
    told = [r.getMessage() for r in plugin_log.records if "clones" in r.getMessage()]
    assert len(told) == (model == "nobody/has-it-here")


async def test_with_the_encoder_everything_is_the_hosts_and_nothing_is_encoded(serving):
    async with serving(with_encoder=True) as server:
        for fields in ({"voice": "fr_male"}, {"ref_audio": data_url()}):
            assert (await server.speak(**fields)).status_code == 200
            ours, theirs = server.engine.prompts[-1], stocks(server, **fields)
            assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
            assert ours.keys() == theirs.keys()
        [(samples, rate_hz)] = ours["multi_modal_data"]["audio"]
        assert (len(samples), rate_hz) == (48_000, 24_000)
        assert "nobody" in message(await server.speak(voice="nobody"))
        stored = await server.register("Ann", wav(), precompute="true")
        assert stored.status_code == 200
        await server.settled()
        shown = (await server.client.get("/v1/audio/voices/Ann")).json()
        assert shown["cache_status"] == "unsupported"
        forced = await server.client.post("/v1/audio/voices/Ann/cache")
        assert "nothing to precompute" in message(forced)
        assert not any(call.startswith("tts_cache_") for call in server.engine.calls)
