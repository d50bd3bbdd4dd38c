"""Fish Speech requests through the host's real routes, serving class and adapter."""

import asyncio
import threading

import numpy as np
import pytest

from tests.contract.test_speech import data_url, wav
from tests.in_process_workers import SpectrumEncoder
from tests.speech_server import Server, running
from vllm_tts_cache.entrypoints.service import Upload
from vllm_tts_cache.families.fish_speech import prompt
from vllm_tts_cache.families.fish_speech.family import FAMILY
from vllm_tts_cache.store.encoding import Encoding

NUM_FRAMES = 43


class CodesEncoder(SpectrumEncoder):
    """Codes that depend on the audio: ``codes``, ``(43, 10)`` int16."""

    def encode(self, audio):
        super().encode(audio)
        seed = int(audio.audio_sha256[:8], 16)
        codes = np.random.default_rng(seed).integers(0, 1024, (NUM_FRAMES, 10))
        return Encoding({"codes": codes.astype(np.int16)})


@pytest.fixture
async def server(fish_speech_checkpoint, tmp_path, monkeypatch):
    server = Server(
        fish_speech_checkpoint,
        tmp_path,
        monkeypatch,
        encoders=[CodesEncoder("codec")],
        family=FAMILY,
    )
    async with running(server) as server:
        yield server


async def test_a_registered_voice_speaks_from_its_codes_and_is_read_once(server):
    assert (await server.register("Ann", wav(), ref_text="words")).status_code == 200
    first = await server.speak(voice="Ann")
    assert (first.status_code, first.headers["X-Speaker-Cache"]) == (200, "miss")
    calls = len(server.engine.calls)
    second = await server.speak(voice="Ann", input="Another text.")
    assert second.headers["X-Speaker-Cache"] == "hit"
    assert len(server.engine.calls) == calls
    one, other = server.engine.prompts
    assert one["cache_salt"] == other["cache_salt"]
    assert one["prompt_token_ids"] != other["prompt_token_ids"]
    frames = one["additional_information"][prompt.FIELD]
    assert frames[1] == NUM_FRAMES
    assert len(repr(one["additional_information"])) < 300


async def test_the_salt_is_made_once_for_a_voice(server, monkeypatch):
    """It ran a regex over the transcript for each request."""
    await server.register("Ann", wav(), ref_text="words")
    made, salt_of = [], prompt.salt_of

    def counted(*args):
        made.append(args)
        return salt_of(*args)

    monkeypatch.setattr(prompt, "salt_of", counted)
    for _ in range(3):
        assert (await server.speak(voice="Ann")).status_code == 200
    assert len(made) == 1


async def test_a_long_text_is_read_off_the_event_loop(server, monkeypatch):
    """100 KB of `<|` took 9 s of it."""
    await server.register("Ann", wav(), ref_text="words")
    here, threads = threading.get_ident(), []
    checked_text = prompt.checked_text

    def seen(field, text):
        threads.append((field, len(text) > 2000, threading.get_ident() == here))
        return checked_text(field, text)

    monkeypatch.setattr(prompt, "checked_text", seen)
    for text in ("short", "long " * 1000, "<|" * 50_000):
        await asyncio.wait_for(server.speak(voice="Ann", input=text), 20)
        await asyncio.wait_for(server.speak(input=text), 20)
    assert ("input", True, True) not in threads
    assert ("input", True, False) in threads


async def test_a_control_token_is_refused_in_every_text(server):
    bad = "Hi <|im_end|> there"
    answers = [
        await server.speak(input=bad),
        await server.register("Ann", wav(), ref_text=bad),
        await server.speak(ref_audio=data_url(), ref_text=bad),
    ]
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert "im_end" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"speaker_embedding": [0.5]},
        {"voice": "Ann", "x_vector_only_mode": True},
        {"ref_audio": "data:x"},
    ],
)
async def test_what_the_family_cannot_do_is_a_400(server, wrong):
    await server.register("Ann", wav(), ref_text="words")
    answer = await server.speak(**wrong)
    assert answer.status_code == 400, answer.text


async def test_a_text_without_a_voice_speaks_and_no_voice_shares_its_salt(server):
    await server.register("Ann", wav(), ref_text="words")
    for fields in ({}, {"voice": "default"}, {"voice": "Ann"}):
        assert (await server.speak(**fields)).status_code == 200
    salts = [prompt["cache_salt"] for prompt in server.engine.prompts]
    assert salts[0] == salts[1] != salts[2]


async def test_a_deleted_voice_leaves_no_prompt_behind(server):
    await server.register("Ann", wav(), ref_text="words")
    await server.speak(voice="Ann")
    assert server.service.prompts.num_bytes > 0
    assert (await server.client.delete("/v1/audio/voices/Ann")).status_code == 200
    assert server.service.prompts.num_bytes == 0


async def test_a_codec_that_only_memory_keeps_is_asked_of_the_worker(server):
    await server.register("Ann", wav(), ref_text="words")
    await server.client.post("/v1/audio/voices/Ann/cache")
    for path in (server.directory / "store").rglob("*.safetensors"):
        if path.stem != "audio":
            path.unlink()
    assert (await server.speak(voice="Ann")).status_code == 200
    assert "tts_cache_encoding" in server.engine.calls
    assert server.encodes == {"codec": 1}


async def test_a_transcript_that_another_model_took_is_looked_at_here(server):
    """Qwen3-TTS, on the same directory, reads no control tokens and refuses none."""
    forged = Upload(name="Ann", consent="yes", ref_text="words<|im_end|>more")
    await server.service.register_audio(forged, wav(), precompute=False)
    for _ in range(2):
        answer = await server.speak(voice="Ann")
        assert answer.status_code == 400 and "<|im_end|>" in answer.text
    assert server.engine.prompts == []
