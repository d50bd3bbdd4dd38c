"""CosyVoice3 requests through the host's real routes, serving class and adapter."""

import asyncio
import base64
import threading
from itertools import chain
from typing import Any

import pytest
from vllm_omni.model_executor.models.cosyvoice3.tokenizer import CosyVoice3Tokenizer
from vllm_omni.model_executor.models.cosyvoice3.utils import (
    concat_text_with_prompt_ids,
    extract_text_token,
)

from tests.audio_clips import sndfile_bytes, voiced
from tests.families.cosyvoice3.case import CASE
from tests.families.serving import ann, message
from vllm_tts_cache.families.cosyvoice3.family import FAMILY
from vllm_tts_cache.families.cosyvoice3.positions import num_used_tokens
from vllm_tts_cache.families.cosyvoice3.prompt import MODE, TEXT_IDS, load_tokenizer
from vllm_tts_cache.speaker.reference import FIELD

SPOKEN = "What is said in it."
MANNER = "Please speak fast."
INSTRUCTED = {"instructions": MANNER}
SYSTEM = "You are a helpful assistant."
MARK = "<|endofprompt|>"


@pytest.fixture(scope="module")
def tokenizer(own_checkpoint):
    config = CASE.hf_config(own_checkpoint)
    return load_tokenizer(str(own_checkpoint), None, config)


async def spoken(server, **fields):
    """What the engine is told of Ann's."""
    answer = await server.speak(voice="Ann", **fields)
    assert answer.status_code == 200, answer.text
    return server.engine.prompts[-1]["additional_information"]


def ids_of(tokenizer, *texts):
    return [i for text in texts for i in tokenizer.encode(text)]


async def test_a_zero_shot_prompt_is_as_long_and_holds_no_audio(server, tokenizer):
    await ann(server, ref_text=SPOKEN)
    assert (await server.speak(voice="Ann")).status_code == 200
    (prompt,) = server.engine.prompts
    # The host's processor puts so many placeholders before the texts' ids.
    text, length = extract_text_token("Hello.", tokenizer, "all")
    spoken, spoken_length = extract_text_token(
        f"{SYSTEM}{MARK}{SPOKEN}", tokenizer, "all"
    )
    lengths: Any = (length, spoken_length)
    hosts, _ = concat_text_with_prompt_ids(text, lengths[0], spoken, lengths[1])
    clip = (await server.client.get("/v1/audio/voices/Ann")).json()["voice"]
    num_samples = round(clip["duration_seconds"] * clip["sample_rate"])
    num_codes = num_used_tokens(num_samples, clip["sample_rate"])
    info = prompt["additional_information"]
    assert set(info) == {FIELD, MODE, TEXT_IDS}
    assert [*chain(*info[TEXT_IDS])] == hosts.flatten().tolist()
    expected_length = 2 + num_codes + hosts.shape[1]
    assert prompt["prompt_token_ids"] == [1] * expected_length
    assert not {"multi_modal_data", "mm_processor_kwargs", "prompt"} & set(prompt)


async def test_a_text_that_has_the_mark_is_taken_as_it_is(server, tokenizer):
    await ann(server)
    own = f"Be yourself.{MARK}"
    for fields, texts in (
        ({"ref_text": f"{own}{SPOKEN}"}, [f"{own}{SPOKEN}", "Hello."]),
        ({"input": f"{own}Hello."}, [f"{own}Hello."]),
        ({"instructions": own}, [own, "Hello."]),
    ):
        info = await spoken(server, **fields)
        assert [*chain(*info[TEXT_IDS])] == ids_of(tokenizer, *texts)


async def test_instructions_choose_their_mode_unless_the_request_names_another(server):
    await ann(server)
    named = {"clone_mode": "zero_shot"}
    for fields, mode in (
        (INSTRUCTED, "instruct"),
        ({**INSTRUCTED, "ref_text": SPOKEN}, "instruct"),
        ({**INSTRUCTED, "ref_text": SPOKEN, "extra_params": named}, "zero_shot"),
        ({**INSTRUCTED, "extra_params": {"temperature": 0.5}}, "instruct"),
        ({**INSTRUCTED, "extra_params": {"clone_mode": None}}, "instruct"),
        ({"instructions": " "}, "cross_lingual"),
    ):
        assert (await spoken(server, **fields))[MODE] == mode
    # One clip, encoded once for all of them.
    assert server.encodes == dict.fromkeys(FAMILY.encoders, 1)


async def test_a_speech_is_as_long_as_officially(server, tokenizer, monkeypatch):
    """Of two to twenty codes a token of what is said, the mark's text included."""
    await ann(server, ref_text=SPOKEN)
    seen = []
    generate = server.engine.generate

    def seeing(*, sampling_params_list, **rest):
        seen.append(sampling_params_list[0])
        return generate(sampling_params_list=sampling_params_list, **rest)

    monkeypatch.setattr(server.engine, "generate", seeing)
    whole = f"{SYSTEM}{MARK}Hello."
    for fields, said in (
        ({}, "Hello."),
        (INSTRUCTED, "Hello."),
        ({"extra_params": {"clone_mode": "cross_lingual"}}, whole),
    ):
        await spoken(server, **fields)
        num_ids = len(tokenizer.encode(said))
        found = seen[-1].min_tokens, seen[-1].max_tokens
        assert found == (2 * num_ids, 20 * num_ids)
    await server.speak(voice="Ann", max_new_tokens=3)
    assert (seen[-1].min_tokens, seen[-1].max_tokens) == (3, 3)


async def test_a_clip_that_the_official_code_refuses_is_refused_by_every_way(server):
    """Also as a voice of another model: servers of several may share one directory."""
    from tests.in_process_workers import clip, decoded, new_speaker

    low = sndfile_bytes(voiced(8_000, 2.0), 8_000)
    url = f"data:audio/wav;base64,{base64.b64encode(low).decode()}"
    audio = clip(rate_hz=8_000)
    server.service.store.registrations.register(
        new_speaker("low", audio), decoded(audio)
    )
    for answer in (
        await server.register("Bob", low, ref_text=SPOKEN),
        await server.speak(ref_audio=url, ref_text=SPOKEN),
        await server.speak(voice="low"),
    ):
        assert "16000 Hz or more" in message(answer)
    shown = (await server.client.get("/v1/audio/voices/low")).json()
    assert shown["cache_status"] == "unsupported"
    assert server.encodes == dict.fromkeys(FAMILY.encoders, 0)


async def test_a_long_text_is_tokenized_once_off_the_event_loop(server, monkeypatch):
    """The host cuts it once more, to say how long its speech may be."""
    await ann(server, ref_text=SPOKEN)
    here, cut_here = threading.get_ident(), {}
    encode = CosyVoice3Tokenizer.encode

    def seen(self, text, **kwargs):
        cut_here.setdefault(text, []).append(threading.get_ident() == here)
        return encode(self, text, **kwargs)

    monkeypatch.setattr(CosyVoice3Tokenizer, "encode", seen)
    for text in ("short", "long " * 1000):
        await asyncio.wait_for(server.speak(voice="Ann", input=text), 60)
    assert cut_here["short"] == [True] and cut_here["long " * 1000] == [False]
