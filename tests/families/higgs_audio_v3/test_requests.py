"""Higgs Audio v3 requests through the host's real routes, serving class and adapter."""

import pytest
from transformers import AutoTokenizer
from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
    AUDIO_PLACEHOLDER_ID,
    HiggsAudioV3TokenizerAdapter,
)

from tests.families.serving import anns_prompt
from vllm_tts_cache.families.higgs_audio_v3.prompt import FILLER_ID

SPOKEN = "What is said in it."


@pytest.fixture(scope="module")
def hosts(own_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(own_checkpoint)
    return HiggsAudioV3TokenizerAdapter(tokenizer)


@pytest.mark.parametrize("spoken", [None, SPOKEN])
async def test_it_has_the_hosts_ids_and_no_audio(server, hosts, spoken):
    given = {} if spoken is None else {"ref_text": spoken}
    ids, where = await anns_prompt(server, "Hello.", **given)
    expected = hosts.build_prompt(
        "Hello.", num_ref_tokens=where.num_rows, reference_text=spoken
    )
    places = range(where.start, where.start + where.num_rows)
    assert [ids[at] for at in places] == [FILLER_ID] * where.num_rows
    for at in places:
        assert expected[at] == AUDIO_PLACEHOLDER_ID
        expected[at] = FILLER_ID
    assert ids == expected
