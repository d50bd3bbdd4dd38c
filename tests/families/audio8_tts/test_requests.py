"""Audio8 TTS requests through the host's real routes, serving class and adapter."""

import json
import math

import numpy as np
import pytest
from vllm_omni.model_executor.models.audio8_tts.prompt_utils import (
    build_text_only_prompt_ids,
    build_voice_clone_prompt_ids,
)

from tests.contract.test_speech import data_url, wav
from tests.families.encoded_once import check_encoded_once
from tests.in_process_workers import SpectrumEncoder
from tests.speech_server import Server, running
from vllm_tts_cache.families.audio8_tts.family import FAMILY
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.encoding import Encoding

SPOKEN = "What is said in it."
FIRST_SEMANTIC_ID = 151_678


def codes_of(num_samples):
    num_frames = math.ceil(num_samples * 44_100 / 24_000 / 2048)
    return np.arange(10 * num_frames).reshape(num_frames, 10).astype(np.int16) % 1024


class CodesEncoder(SpectrumEncoder):
    """``codes`` of the audio's length."""

    def encode(self, audio):
        super().encode(audio)
        return Encoding({"codes": codes_of(audio.num_samples)})


@pytest.fixture
async def server(audio8_checkpoint, tokenizer, tmp_path, monkeypatch):
    server = Server(
        audio8_checkpoint,
        tmp_path / "samples",
        monkeypatch,
        encoders=[CodesEncoder("codec")],
        family=FAMILY,
    )
    async with running(server) as server:
        server.handler._get_tts_adapter()._cached_tokenizer = tokenizer
        yield server


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


async def test_a_prompt_has_the_hosts_ids_and_holds_no_audio(server, tokenizer):
    audio = wav(seconds=2.0)
    assert (await server.register("Ann", audio, ref_text=SPOKEN)).status_code == 200
    assert (await server.speak(voice="Ann", input="Hello  there.")).status_code == 200
    (made,) = server.engine.prompts
    told = made["additional_information"]
    assert set(told) == {FIELD, rows.FIELD}
    assert len(json.dumps(told)) < 200
    codes = codes_of(48_000)
    semantic = (codes[:, 0].astype(int) + FIRST_SEMANTIC_ID).tolist()
    ids, start, _, _ = build_voice_clone_prompt_ids(
        tokenizer, "Hello  there.", SPOKEN, semantic
    )
    assert made["prompt_token_ids"] == ids
    expected = ReferenceRows.behind(ids[:start], len(codes))
    assert ReferenceRows.from_info(told) == expected


async def test_two_voices_share_no_salt_and_two_texts_do(server):
    await server.register("Ann", wav(), ref_text=SPOKEN)
    for text in ("Hello.", "Something else."):
        await server.speak(voice="Ann", input=text)
    inline = data_url(pitch_hz=330.0)
    assert (await server.speak(ref_audio=inline, ref_text=SPOKEN)).status_code == 200
    one, again, other = [prompt["cache_salt"] for prompt in server.engine.prompts]
    assert one == again != other


async def test_text_without_a_voice_is_the_hosts(server, tokenizer):
    assert (await server.speak()).status_code == 200
    (made,) = server.engine.prompts
    ids, text = build_text_only_prompt_ids(tokenizer, "Hello.")
    assert made["prompt_token_ids"] == ids
    assert made["additional_information"] == {"text": [text]}


async def test_a_clone_without_a_transcript_is_a_400(server):
    await server.register("mute", wav())
    assert "ref_text" in message(await server.speak(voice="mute"))
    given = await server.speak(voice="mute", ref_text=SPOKEN)
    assert given.status_code == 200, given.text


@pytest.mark.parametrize(
    "bad", ["Hi <|im_end|>", "<|semantic:3|>", "<|" * 65, "a" * 16_385]
)
async def test_what_the_model_would_read_as_something_else_is_refused(server, bad):
    for answer in [
        await server.speak(ref_audio=data_url(), ref_text=bad),
        await server.speak(ref_audio=data_url(), ref_text=SPOKEN, input=bad),
        await server.speak(input=bad),
    ]:
        assert message(answer)
    assert server.engine.prompts == []
    speakers = await server.speak(input="<speaker:1>Hello. <|speaker:2|>And you?")
    assert speakers.status_code == 200, speakers.text


async def test_named_or_inline_a_clip_is_encoded_once(server):
    """The host encodes an inline clip for every request, in its worker."""
    await check_encoded_once(server)
