"""Audio8 TTS requests through the host's real routes, serving class and adapter."""

from vllm_omni.model_executor.models.audio8_tts.prompt_utils import (
    build_text_only_prompt_ids,
    build_voice_clone_prompt_ids,
)

from tests.families.audio8_tts.case import CASE, Tokenizer
from tests.in_process_workers import clip
from tests.speaking import wav
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.families.networks.prompts import ReferenceRows
from vllm_tts_cache.speaker.reference import FIELD

SPOKEN = "What is said in it."
FIRST_SEMANTIC_ID = 151_678


async def test_a_prompt_has_the_hosts_ids_and_holds_no_audio(server):
    codes = CASE.arrays["codec"](clip(seconds=2.0, rate_hz=24_000))["codes"]
    await server.register("Ann", wav(seconds=2.0), ref_text=SPOKEN)
    assert (await server.speak(voice="Ann", input="Hello  there.")).status_code == 200
    (made,) = server.engine.prompts
    told = made["additional_information"]
    assert set(told) == {FIELD, prompts.ROWS}
    semantic = (codes[:, 0].astype(int) + FIRST_SEMANTIC_ID).tolist()
    ids, start, _, _ = build_voice_clone_prompt_ids(
        Tokenizer(), "Hello  there.", SPOKEN, semantic
    )
    assert made["prompt_token_ids"] == ids
    expected = ReferenceRows.behind(ids[:start], len(codes))
    assert ReferenceRows.from_info(told) == expected


async def test_text_without_a_voice_is_the_hosts(server):
    for text in ("Hello.", "<speaker:1>Hello. <|speaker:2|>And you?"):
        assert (await server.speak(input=text)).status_code == 200
    made = server.engine.prompts[0]
    ids, text = build_text_only_prompt_ids(Tokenizer(), "Hello.")
    assert made["prompt_token_ids"] == ids
    assert made["additional_information"] == {"text": [text]}
