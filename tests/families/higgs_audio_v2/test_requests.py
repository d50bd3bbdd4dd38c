"""Higgs Audio v2 requests through the host's real routes, serving class and adapter."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm_omni.model_executor.models.higgs_audio_v2 import (
    higgs_audio_v2_tokenizer as host,
)

from tests.contract.test_speech import data_url, wav
from tests.families.encoded_once import check_encoded_once
from tests.in_process_workers import SpectrumEncoder
from tests.speech_server import Server, running
from vllm_tts_cache.families.higgs_audio_v2.family import FAMILY
from vllm_tts_cache.families.higgs_audio_v2.prompt import NUM_ADDED_ROWS
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import num_clip_frames
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.encoding import Encoding

SPOKEN = "What is said in it."


class CodesEncoder(SpectrumEncoder):
    """``codes`` of the audio's length."""

    def encode(self, audio):
        super().encode(audio)
        number = num_clip_frames(audio.num_samples, audio.sample_rate_hz)
        return Encoding({"codes": np.zeros((number, 8), np.int16)})


@pytest.fixture
async def server(higgs_audio_v2_checkpoint, tmp_path, monkeypatch):
    server = Server(
        higgs_audio_v2_checkpoint,
        tmp_path,
        monkeypatch,
        encoders=[CodesEncoder("codec")],
        family=FAMILY,
    )
    async with running(server) as server:
        yield server


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


async def test_a_prompt_has_the_hosts_ids_and_holds_no_audio(
    server, higgs_audio_v2_checkpoint, monkeypatch
):
    assert (await server.register("Ann", wav(), ref_text=SPOKEN)).status_code == 200
    assert (await server.speak(voice="Ann")).status_code == 200
    (made,) = server.engine.prompts
    told = made["additional_information"]
    assert set(told) == {FIELD, rows.FIELD}
    assert len(json.dumps(told)) < 200
    where = ReferenceRows.from_info(told)
    codes = torch.zeros(8, where.num_rows - NUM_ADDED_ROWS, dtype=torch.long)
    monkeypatch.setattr(host, "_encode_ref_audio_codes", lambda *_: codes)
    tokenizer = AutoTokenizer.from_pretrained(higgs_audio_v2_checkpoint)
    expected = host.build_voice_clone_prompt(
        SimpleNamespace(tokenizer=tokenizer), "Hello.", np.zeros(9), 24_000, SPOKEN
    )
    assert made["prompt_token_ids"] == expected["prompt_token_ids"]
    assert len(expected["audio_input_ids"]) == where.num_rows
    placeholders = {
        tokenizer.convert_tokens_to_ids(token)
        for token in ("<|AUDIO_OUT|>", "<|reserved_special_token_6|>")
    }
    places = [
        at for at, token in enumerate(made["prompt_token_ids"]) if token in placeholders
    ]
    assert places == list(range(where.start, where.start + where.num_rows))


async def test_two_voices_share_no_salt_and_two_texts_do(server):
    await server.register("Ann", wav(), ref_text=SPOKEN)
    for text in ("Hello.", "Something else."):
        await server.speak(voice="Ann", input=text)
    inline = data_url(pitch_hz=330.0)
    assert (await server.speak(ref_audio=inline, ref_text=SPOKEN)).status_code == 200
    one, again, other = [prompt["cache_salt"] for prompt in server.engine.prompts]
    assert one == again != other


async def test_a_clone_without_a_transcript_is_a_400(server):
    await server.register("mute", wav())
    assert "ref_text" in message(await server.speak(voice="mute"))
    assert "ref_text" in message(await server.speak(ref_audio=data_url()))
    given = await server.speak(voice="mute", ref_text=SPOKEN)
    assert given.status_code == 200, given.text


@pytest.mark.parametrize("bad", ["Hi <|AUDIO_OUT|> there", "[SPEAKER1] Hi."])
async def test_what_the_model_would_read_as_something_else_is_refused(server, bad):
    answers = [
        await server.register("Ann", wav(), ref_text=bad),
        await server.speak(ref_audio=data_url(), ref_text=bad),
        await server.speak(ref_audio=data_url(), ref_text=SPOKEN, input=bad),
    ]
    for answer in answers:
        assert "AUDIO_OUT" in (text := message(answer)) or "[SPEAKER" in text
    assert server.engine.prompts == []


@pytest.mark.parametrize(
    "wrong",
    [{"language": "en"}, {"instructions": "Whisper."}, {"speed": 2.0}],
)
async def test_what_the_host_refuses_of_a_clone_is_refused(server, wrong):
    await server.register("Ann", wav(), ref_text=SPOKEN)
    field = next(iter(wrong))
    assert field in message(await server.speak(voice="Ann", **wrong))


async def test_named_or_inline_a_clip_is_encoded_once(server, monkeypatch):
    """The host encodes for every request, and fetches its tokenizer for the first."""

    def refuse(*_):
        raise AssertionError("the host encodes")

    for name in ("_encode_ref_audio_codes", "_load_audio_tokenizer"):
        monkeypatch.setattr(host, name, refuse)
    await check_encoded_once(server)
