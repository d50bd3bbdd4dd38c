"""Higgs Audio v3 requests through the host's real routes, serving class and adapter."""

import pytest
from transformers import AutoTokenizer
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    AUDIO_PLACEHOLDER_ID,
    HiggsAudioV3TokenizerAdapter,
)

from tests.families.serving import ann
from vllm_tts_cache.families.higgs_audio_v3.prompt import FILLER_ID
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.families.networks.prompts import ReferenceRows
from vllm_tts_cache.speaker.reference import FIELD

SPOKEN = "What is said in it."


@pytest.fixture(scope="module")
def hosts(own_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(own_checkpoint)
    return HiggsAudioV3TokenizerAdapter(tokenizer)


@pytest.mark.parametrize("spoken", [None, SPOKEN])
async def test_a_prompt_has_the_hosts_ids_and_holds_no_audio(server, hosts, spoken):
    await ann(server, **({} if spoken is None else {"ref_text": spoken}))
    assert (await server.speak(voice="Ann")).status_code == 200
    (made,) = server.engine.prompts
    told = made["additional_information"]
    assert set(told) == {FIELD, prompts.ROWS}
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
