"""Higgs Audio v3 requests through the host's real routes, serving class and adapter."""

import json

import msgspec
import pytest
from transformers import AutoTokenizer
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    AUDIO_PLACEHOLDER_ID,
    HiggsAudioV3TokenizerAdapter,
)

from tests.contract.test_speech import by_websocket, data_url, in_a_batch, wav
from vllm_tts_cache.families.higgs_audio_v3.prompt import FILLER_ID
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.ref import FIELD

SPOKEN = "What is said in it."


@pytest.fixture(scope="module")
def hosts(higgs_audio_v3_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(higgs_audio_v3_checkpoint)
    return HiggsAudioV3TokenizerAdapter(tokenizer)


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


async def ann(server, seconds=None, **fields):
    clip = wav() if seconds is None else wav(seconds=seconds)
    answer = await server.register("Ann", clip, **fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("spoken", [None, SPOKEN])
async def test_a_prompt_has_the_hosts_ids_and_holds_no_audio(server, hosts, spoken):
    await ann(server, **({} if spoken is None else {"ref_text": spoken}))
    assert (await server.speak(voice="Ann")).status_code == 200
    (made,) = server.engine.prompts
    told = made["additional_information"]
    assert set(told) == {FIELD, rows.FIELD}
    where = ReferenceRows.from_info(told)
    expected = hosts.build_prompt(
        "Hello.", num_ref_tokens=where.num_rows, reference_text=spoken
    )
    ids = made["prompt_token_ids"]
    places = range(where.start, where.start + where.num_rows)
    assert [ids[at] for at in places] == [FILLER_ID] * where.num_rows
    for at in places:
        assert expected[at] == AUDIO_PLACEHOLDER_ID
        expected[at] = FILLER_ID
    assert ids == expected
    assert len(json.dumps(told)) < 200


async def test_all_texts_of_a_voice_begin_alike_under_one_salt(server):
    await ann(server, ref_text=SPOKEN)
    for text in ("Hello.", "Something else."):
        assert (await server.speak(voice="Ann", input=text)).status_code == 200
    one, other = server.engine.prompts
    assert one["cache_salt"] == other["cache_salt"]
    where = ReferenceRows.from_info(one["additional_information"])
    end = where.start + where.num_rows
    assert one["prompt_token_ids"][:end] == other["prompt_token_ids"][:end]
    assert one["prompt_token_ids"] != other["prompt_token_ids"]


async def test_two_voices_and_none_share_no_salt(server):
    await ann(server, ref_text=SPOKEN)
    other = await server.speak(ref_audio=data_url(pitch_hz=330.0), ref_text=SPOKEN)
    assert other.status_code == 200, other.text
    for fields in ({}, {"voice": "Ann"}):
        assert (await server.speak(**fields)).status_code == 200
    salts = [prompt.get("cache_salt") for prompt in server.engine.prompts]
    assert len(set(salts)) == 3


async def test_a_warm_message_has_four_kilobytes_at_most_at_30_seconds(server):
    await ann(server, seconds=29.9, ref_text=SPOKEN)
    assert (await server.speak(voice="Ann")).status_code == 200
    (made,) = server.engine.prompts
    assert len(made["prompt_token_ids"]) > 740
    assert len(msgspec.msgpack.encode(made)) <= 2048


async def test_a_stored_transcript_is_used_and_the_requests_own_comes_first(
    server, hosts
):
    await ann(server, ref_text=SPOKEN)
    await server.speak(voice="Ann")
    await server.speak(voice="Ann", ref_text="Other words.")
    for made, spoken in zip(
        server.engine.prompts, (SPOKEN, "Other words."), strict=True
    ):
        start = ReferenceRows.from_info(made["additional_information"]).start
        told = hosts.tokenizer.decode(made["prompt_token_ids"][2 : start - 1])
        assert told == spoken


async def test_a_control_token_is_refused_in_every_text(server):
    bad = "Hi <|audio|> there"
    answers = [
        await server.speak(input=bad),
        await server.register("Ann", wav(), ref_text=bad),
        await server.speak(ref_audio=data_url(), ref_text=bad),
    ]
    assert ["<|audio|>" in message(answer) for answer in answers] == [True] * 3
    assert server.engine.prompts == []


async def test_in_a_batch_and_by_websocket_it_speaks_as_well(server):
    await ann(server, ref_text=SPOKEN)
    for tell in (in_a_batch, by_websocket):
        await tell(server, voice="Ann")
    assert len(server.engine.prompts) >= 2
    assert {p["cache_salt"] for p in server.engine.prompts} == {
        server.engine.prompts[0]["cache_salt"]
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"speaker_embedding": [0.5]},
        {"voice": "Ann", "x_vector_only_mode": True},
        {"voice": "nobody"},
        {"voice": "Ann", "extra_params": {"clone_mode": "x_vector"}},
    ],
)
async def test_what_the_family_cannot_do_is_a_400(server, wrong):
    await ann(server, ref_text=SPOKEN)
    answer = await server.speak(**wrong)
    assert answer.status_code in {400, 404}, answer.text
    assert server.engine.prompts == []
