"""Audio8 TTS requests through the host's real routes, serving class and adapter."""

from vllm_omni.model_executor.models.audio8_tts.prompt_utils import (
    build_text_only_prompt_ids,
    build_voice_clone_prompt_ids,
)

from tests.families.audio8_tts.case import CASE, Tokenizer
from tests.families.serving import anns_prompt
from tests.in_process_workers import clip
from vllm_tts_cache.families.networks.prompts import ReferenceRows

SPOKEN = "What is said in it."
FIRST_SEMANTIC_ID = 151_678


async def test_it_has_the_hosts_ids_and_no_audio(server):
    codes = CASE.arrays["codec"](clip(seconds=2.0, rate_hz=24_000))["codes"]
    made, where = await anns_prompt(server, "Hello  there.", ref_text=SPOKEN)
    semantic = (codes[:, 0].astype(int) + FIRST_SEMANTIC_ID).tolist()
    ids, start, _, _ = build_voice_clone_prompt_ids(
        Tokenizer(), "Hello  there.", SPOKEN, semantic
    )
    assert made == ids
    assert where == ReferenceRows.behind(ids[:start], len(codes))


async def test_text_without_a_voice_is_the_hosts(server):
    for text in ("Hello.", "<speaker:1>Hello. <|speaker:2|>And you?"):
        assert (await server.speak(input=text)).status_code == 200
    made = server.engine.prompts[0]
    ids, text = build_text_only_prompt_ids(Tokenizer(), "Hello.")
    assert made["prompt_token_ids"] == ids
    assert made["additional_information"] == {"text": [text]}
