"""CosyVoice3 requests through the host's real routes, serving class and adapter."""

import asyncio
import base64
import json
import threading
from itertools import chain
from typing import Any

import numpy as np
import pytest
from vllm_omni.model_executor.models.cosyvoice3 import cosyvoice3 as host
from vllm_omni.model_executor.models.cosyvoice3.tokenizer import CosyVoice3Tokenizer
from vllm_omni.model_executor.models.cosyvoice3.utils import (
    concat_text_with_prompt_ids,
    extract_text_token,
)

from tests.audio_clips import sndfile_bytes, voiced
from tests.contract.test_speech import by_websocket, data_url, in_a_batch, wav
from tests.families.cosyvoice3.case import CASE
from tests.in_process_workers import SpectrumEncoder
from tests.speech_server import Server, running
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, MEL, SPEAKER, TOKENS
from vllm_tts_cache.families.cosyvoice3.positions import (
    num_mel_frames,
    num_tokens,
    num_used_tokens,
)
from vllm_tts_cache.families.cosyvoice3.prompt import MODE, TEXT_IDS
from vllm_tts_cache.families.cosyvoice3.text import load_tokenizer
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.encoding import Encoding

SPOKEN = "What is said in it."
MANNER = "Please speak fast."
INSTRUCTED = {"instructions": MANNER}
SYSTEM = "You are a helpful assistant."
MARK = "<|endofprompt|>"


class ClipEncoder(SpectrumEncoder):
    """An array of the audio's length."""

    def encode(self, audio):
        super().encode(audio)
        size = audio.num_samples, audio.sample_rate_hz
        array = {
            TOKENS: lambda: np.zeros(num_tokens(*size), np.int16),
            MEL: lambda: np.zeros((num_mel_frames(*size), 80), np.float32),
            SPEAKER: lambda: np.zeros(192, np.float32),
        }[self.name]()
        return Encoding({self.name: array})


@pytest.fixture
async def server(cosyvoice3_checkpoint, tmp_path, monkeypatch):
    encoders = [ClipEncoder(name) for name in FAMILY.encoders]
    served = Server(
        cosyvoice3_checkpoint, tmp_path, monkeypatch, encoders=encoders, family=FAMILY
    )
    async with running(served) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(cosyvoice3_checkpoint):
    config = CASE.hf_config(cosyvoice3_checkpoint)
    return load_tokenizer(str(cosyvoice3_checkpoint), None, config)


def told(server):
    return [prompt["additional_information"] for prompt in server.engine.prompts]


def modes(server):
    """The mode of each request that reached the engine."""
    return [info[MODE] for info in told(server)]


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


async def ann(server, **fields):
    answer = await server.register("Ann", wav(), **fields)
    assert answer.status_code == 200, answer.text


def ids_of(tokenizer, *texts):
    return [i for text in texts for i in tokenizer.encode(text)]


async def test_a_zero_shot_prompt_is_as_long_as_the_hosts_and_holds_no_audio(
    server, tokenizer
):
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


async def test_each_mode_says_what_the_official_examples_say(server, tokenizer):
    await ann(server, ref_text=SPOKEN)
    cases = {
        "zero_shot": ({}, [f"{SYSTEM}{MARK}{SPOKEN}", "Hello."]),
        "cross_lingual": (
            {"extra_params": {"clone_mode": "cross_lingual"}},
            [f"{SYSTEM}{MARK}Hello."],
        ),
        "instruct": (INSTRUCTED, [f"{SYSTEM} {MANNER}{MARK}", "Hello."]),
    }
    for fields, _ in cases.values():
        answer = await server.speak(voice="Ann", **fields)
        assert answer.status_code == 200, answer.text
    assert modes(server) == list(cases)
    for info, (_, texts) in zip(told(server), cases.values(), strict=True):
        assert [*chain(*info[TEXT_IDS])] == ids_of(tokenizer, *texts)
    longest, *others = (len(p["prompt_token_ids"]) for p in server.engine.prompts)
    assert all(longest > length for length in others), "codes are told in one mode"


async def test_a_text_that_has_the_mark_is_taken_as_it_is(server, tokenizer):
    await ann(server)
    own = f"Be yourself.{MARK}"
    for fields, texts in (
        ({"ref_text": f"{own}{SPOKEN}"}, [f"{own}{SPOKEN}", "Hello."]),
        ({"input": f"{own}Hello."}, [f"{own}Hello."]),
        ({"instructions": own}, [own, "Hello."]),
    ):
        answer = await server.speak(voice="Ann", **fields)
        assert answer.status_code == 200, answer.text
        assert [*chain(*told(server)[-1][TEXT_IDS])] == ids_of(tokenizer, *texts)


async def test_a_transcript_or_instructions_or_the_mode_itself_choose_it(server):
    await ann(server)
    named = {"clone_mode": "zero_shot"}
    for fields in (
        {},
        {"ref_text": SPOKEN},
        INSTRUCTED,
        {**INSTRUCTED, "ref_text": SPOKEN},
        {**INSTRUCTED, "ref_text": SPOKEN, "extra_params": named},
        {"ref_text": SPOKEN, "extra_params": {"clone_mode": "cross_lingual"}},
        {**INSTRUCTED, "extra_params": {"temperature": 0.5}},
        {**INSTRUCTED, "extra_params": {"clone_mode": None}},
        {"instructions": " "},
    ):
        answer = await server.speak(voice="Ann", **fields)
        assert answer.status_code == 200, answer.text
    assert modes(server) == [
        "cross_lingual",
        "zero_shot",
        "instruct",
        "instruct",
        "zero_shot",
        "cross_lingual",
        "instruct",
        "instruct",
        "cross_lingual",
    ]
    # One clip, encoded once for all of them.
    assert server.encodes == dict.fromkeys(FAMILY.encoders, 1)


async def test_no_reference_is_fetched_or_encoded_by_the_api_process(
    server, monkeypatch
):
    """Stock runs three networks on the event loop, one of them downloaded."""

    def refuse(*_, **__):
        raise AssertionError("the host's processor")

    processor = host.CosyVoice3MultiModalProcessor
    monkeypatch.setattr(processor, "_ensure_s3_model", refuse)
    monkeypatch.setattr(processor, "_build_runtime_components", refuse)
    monkeypatch.setattr(type(server.handler), "_resolve_ref_audio", refuse)
    await ann(server, ref_text=SPOKEN)
    assert (await server.speak(voice="Ann")).status_code == 200
    inline = await server.speak(ref_audio=data_url(), ref_text=SPOKEN)
    assert inline.status_code == 200, inline.text


async def test_a_message_grows_by_a_placeholder_a_token(server):
    sizes = []
    for seconds in (1.0, 29.0):
        clip = data_url(seconds=seconds)
        answer = await server.speak(ref_audio=clip, ref_text=SPOKEN)
        assert answer.status_code == 200, answer.text
        prompt = server.engine.prompts[-1]
        sizes.append(len(repr(prompt["additional_information"])))
        assert len(json.dumps(prompt, separators=(",", ":"))) < 4096
    assert sizes[0] == sizes[1]


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
        answer = await server.speak(voice="Ann", **fields)
        assert answer.status_code == 200, answer.text
        num_ids = len(tokenizer.encode(said))
        found = seen[-1].min_tokens, seen[-1].max_tokens
        assert found == (2 * num_ids, 20 * num_ids)
    await server.speak(voice="Ann", max_new_tokens=3)
    assert (seen[-1].min_tokens, seen[-1].max_tokens) == (3, 3)


@pytest.mark.parametrize("speak", [in_a_batch, by_websocket])
async def test_a_voice_speaks_in_a_batch_and_on_a_websocket(server, speak):
    await ann(server, ref_text=SPOKEN)
    assert await speak(server, voice="Ann") is None
    assert modes(server) == ["zero_shot"]
    assert "not registered" in str(await speak(server, voice="Bob"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "ref_audio"),
        ({"voice": "default"}, "ref_audio"),
        ({"speaker_embedding": [0.5] * 192}, "not from an embedding"),
        ({"voice": "Ann", "x_vector_only_mode": True}, "x_vector_only_mode"),
        ({"voice": "Ann", "extra_params": {"clone_mode": "reference"}}, "zero_shot"),
        (
            {"voice": "Ann", "extra_params": {"clone_mode": "zero_shot"}},
            "needs the transcript",
        ),
        ({"voice": "Ann", "extra_params": {"clone_mode": "instruct"}}, "instructions"),
        ({"ref_audio": data_url()}, "'cross_lingual' needs none"),
        ({"voice": "Bob"}, "not registered"),
        ({"ref_audio": "data:x", "ref_text": SPOKEN}, "reference audio"),
        ({"voice": "Ann", "input": " "}, "empty"),
        ({"voice": "Ann", "max_new_tokens": 5_000}, "max_new_tokens"),
    ],
)
async def test_what_the_family_cannot_do_is_a_400_that_says_so(server, wrong, says):
    await ann(server)
    assert says in message(await server.speak(**wrong))
    assert server.engine.prompts == []


async def test_instructions_that_are_missing_are_asked_for_before_a_clip_is_encoded(
    server,
):
    named = {"extra_params": {"clone_mode": "instruct"}}
    for fields in ({}, {"instructions": " "}):
        answer = await server.speak(ref_audio=data_url(), **named, **fields)
        assert "instructions" in message(answer)
    assert server.encodes == dict.fromkeys(FAMILY.encoders, 0)


@pytest.mark.parametrize("limit", [None, 20])
async def test_instructions_are_as_long_as_the_host_lets_them_be(
    server, monkeypatch, limit
):
    await ann(server)
    if limit is not None:  # as the host's option has it
        monkeypatch.setattr(server.handler, "_max_instructions_length", limit)
    longest = server.handler._max_instructions_length
    answer = await server.speak(voice="Ann", instructions="x" * longest)
    assert answer.status_code == 200, answer.text
    answer = await server.speak(voice="Ann", instructions="x" * (longest + 1))
    assert f"at most {longest} characters" in message(answer)
    assert modes(server) == ["instruct"]


def clip_of(seconds, rate_hz):
    return sndfile_bytes(voiced(rate_hz, seconds), rate_hz)


@pytest.mark.parametrize(
    ("seconds", "rate_hz", "says"),
    [(2.0, 8_000, "16000 Hz or more"), (2.0, 11_025, "16000 Hz or more")],
)
async def test_a_clip_that_the_official_code_refuses_is_refused_by_every_way(
    server, seconds, rate_hz, says
):
    clip = clip_of(seconds, rate_hz)
    assert says in message(await server.register("Bob", clip, ref_text=SPOKEN))
    url = f"data:audio/wav;base64,{base64.b64encode(clip).decode()}"
    answer = await server.speak(ref_audio=url, ref_text=SPOKEN)
    assert says in message(answer)
    assert server.encodes == dict.fromkeys(FAMILY.encoders, 0)


async def test_a_voice_of_another_model_that_is_no_clip_of_this_one_says_why(server):
    """Servers of several models may share one directory."""
    from tests.in_process_workers import clip, decoded, new_speaker

    audio = clip(rate_hz=8_000)
    server.service.store.register(new_speaker("low", audio), decoded(audio))
    assert "16000 Hz or more" in message(await server.speak(voice="low"))


async def test_a_long_text_is_cut_into_tokens_once_and_off_the_event_loop(
    server, monkeypatch
):
    """The host cuts it once more, to say how long its speech may be."""
    await ann(server, ref_text=SPOKEN)
    here, cut_here = threading.get_ident(), {}
    encode = CosyVoice3Tokenizer.encode

    def seen(self, text, **kwargs):
        cut_here.setdefault(text, []).append(threading.get_ident() == here)
        return encode(self, text, **kwargs)

    monkeypatch.setattr(CosyVoice3Tokenizer, "encode", seen)
    for text in ("short", "long " * 1000):
        await asyncio.wait_for(server.speak(voice="Ann", input=text), 20)
    assert cut_here["short"] == [True] and cut_here["long " * 1000] == [False]
