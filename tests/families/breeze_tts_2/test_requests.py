"""Breeze-TTS-2 requests through the host's real routes, serving class and adapter."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from vllm_omni.entrypoints.openai.tts_adapters.breeze_tts_2 import BreezeTTS2Adapter
from vllm_omni.model_executor.stage_input_processors.breeze_tts_2 import (
    expand_cfg_prompts,
)

from tests.contract.test_speech import data_url, lose_files, registered, wav
from tests.families.encoded_once import check_encoded_once
from tests.in_process_workers import SpectrumEncoder
from tests.speech_server import Server, running
from tests.two_tenants import two_tenants
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY, IN_CONTEXT
from vllm_tts_cache.families.breeze_tts_2.offline import BreezePrompts
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.offline.ensure import PreparedSpeaker
from vllm_tts_cache.speaker.ref import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Encoding

SPOKEN = "What is said in it."


class CodesEncoder(SpectrumEncoder):
    """``codes`` of the audio's length."""

    def encode(self, audio):
        super().encode(audio)
        number = num_codec_frames(audio.num_samples, audio.sample_rate_hz)
        return Encoding({"codes": np.zeros((number, 16), np.int16)})


def make(*args):
    server = Server(*args, encoders=[CodesEncoder("codec")], family=FAMILY)
    config: Any = server.engine.model_config
    config.max_model_len = 2048
    return server


@pytest.fixture
async def server(breeze_checkpoint, tokenizer, tmp_path, monkeypatch):
    async with running(make(breeze_checkpoint, tmp_path, monkeypatch)) as server:
        server.handler._get_tts_adapter().tokenizer = tokenizer
        yield server


def hosts_prompt(server, audio=None, **fields):
    """What the host sends for the same clip."""
    adapter = server.handler._get_tts_adapter()
    request = {
        "input": "Hello.",
        "instructions": None,
        "voice": None,
        "ref_text": None if audio is None else SPOKEN,
        "extra_params": None,
        **fields,
    }
    sampling = server.engine.default_sampling_params_list[0]
    reference = None if audio is None else soundfile.read(io.BytesIO(audio))
    hosts: Any = BreezeTTS2Adapter
    return hosts._build_prompt(adapter, SimpleNamespace(**request), sampling, reference)


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instructions": "Whisper."},
        {"extra_params": {"guidance_scale": 3.0, "temperature": 0.5}},
    ],
)
async def test_a_prompt_is_the_hosts_without_the_audio(server, fields):
    audio = wav(seconds=2.03)
    assert (await server.register("Ann", audio, ref_text=SPOKEN)).status_code == 200
    assert (await server.speak(voice="Ann", **fields)).status_code == 200
    (made,) = server.engine.prompts
    told = dict(made["additional_information"])
    expected = hosts_prompt(server, audio, **fields)
    hosts = dict(expected["additional_information"])
    assert hosts.pop("reference_waveform").numel() == 48_720
    assert told.pop(FIELD)
    assert told == hosts
    assert made["prompt_token_ids"] == expected["prompt_token_ids"]
    assert len(json.dumps(told)) < 2000
    for mine, other in zip(
        expand_cfg_prompts(made, None), expand_cfg_prompts(expected, None), strict=True
    ):
        ours: Any = mine.prompt
        theirs: Any = other.prompt
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
        assert FIELD in ours["additional_information"]


async def test_a_label_is_still_one_and_an_unknown_voice_is_refused(server):
    assert (await server.speak(voice="S1")).status_code == 200
    (made,) = server.engine.prompts
    assert FIELD not in made["additional_information"]
    expected = hosts_prompt(server, voice="S1")
    assert made["additional_information"] == expected["additional_information"]
    assert "Nobody" in message(await server.speak(voice="Nobody"))
    assert "S1" in message(await server.register("S1", wav(), ref_text=SPOKEN))


async def test_a_label_in_small_letters_is_told_to_the_model_as_it_knows_it(server):
    assert (await server.speak(voice="s1")).status_code == 200
    (made,) = server.engine.prompts
    expected = hosts_prompt(server, voice="S1")
    assert made["additional_information"] == expected["additional_information"]


async def test_instructions_have_the_hosts_limit(server):
    await server.register("Ann", wav(), ref_text=SPOKEN)
    limit = server.handler._max_instructions_length
    for fields in ({}, {"voice": "Ann"}):
        longest = await server.speak(instructions="x" * limit, **fields)
        assert longest.status_code == 200, longest.text
        for wrong in ("x" * (limit + 1), "Softly.<ins_eos>"):
            refused = await server.speak(instructions=wrong, **fields)
            assert "instructions" in message(refused)


async def test_a_request_whose_encoding_is_lost_on_the_way_is_submitted_again(server):
    sha = await registered(server)
    server.engine.before_prefill = [lambda: lose_files(server, sha)]
    answer = await server.speak(voice="Ann")
    assert answer.status_code == 200, answer.text
    assert len(server.engine.prompts) == 2


async def test_text_without_a_voice_is_the_hosts(server):
    for fields in ({}, {"voice": "default"}):
        assert (await server.speak(**fields)).status_code == 200
    expected = hosts_prompt(server)
    for made in server.engine.prompts:
        assert made["prompt_token_ids"] == expected["prompt_token_ids"]
        assert made["additional_information"] == expected["additional_information"]


async def test_a_clone_without_a_transcript_is_a_400(server):
    await server.register("mute", wav())
    assert "ref_text" in message(await server.speak(voice="mute"))
    given = await server.speak(voice="mute", ref_text=SPOKEN)
    assert given.status_code == 200, given.text


@pytest.mark.parametrize("bad", ["Hi <ins_bos>Shout<ins_eos>", "Hi<eos>"])
async def test_control_tokens_are_refused(server, bad):
    answers = [
        await server.register("Ann", wav(), ref_text=bad),
        await server.speak(ref_audio=data_url(), ref_text=bad),
        await server.speak(ref_audio=data_url(), ref_text=SPOKEN, input=bad),
    ]
    for answer in answers:
        assert "control token" in message(answer)
    assert server.engine.prompts == []
    lines = await server.speak(input="One.\n\nTwo.")
    assert lines.status_code == 200, lines.text


@pytest.mark.parametrize("wrong", [{"language": "en"}, {"speed": 2.0}])
async def test_what_the_host_refuses_of_a_clone_is_refused(server, wrong):
    await server.register("Ann", wav(), ref_text=SPOKEN)
    (field,) = wrong
    assert field in message(await server.speak(voice="Ann", **wrong))


async def warmed_up(server, tokenizer):
    """The prompts that the host warms up with, and what is stored behind it."""
    server.handler._get_tts_adapter().tokenizer = tokenizer
    await server.handler.warmup()
    made = [prompt["additional_information"] for prompt in server.engine.prompts]
    assert len(made) == 5
    assert not any(FIELD in told or "reference_waveform" in told for told in made)
    assert server.encodes == {"codec": 0}
    assert list(server.directory.glob("store/**/*.safetensors")) == []


async def test_a_warm_up_clones_nobody(server, tokenizer):
    """The host clones its own speech, for a reference encoder that is not used here."""
    await warmed_up(server, tokenizer)
    assert (await server.speak(ref_audio=data_url(), ref_text=SPOKEN)).is_success
    assert FIELD in server.engine.prompts[-1]["additional_information"]


async def test_a_server_of_tenants_warms_up(
    breeze_checkpoint, tokenizer, tmp_path, monkeypatch
):
    """Nobody calls yet, so there is no tenant whose clone it could be."""
    async with two_tenants(breeze_checkpoint, tmp_path, monkeypatch, make) as host:
        await warmed_up(host.server, tokenizer)


def test_an_offline_prompt_is_the_hosts_too(tokenizer, monkeypatch):
    prompts = BreezePrompts("nowhere", {}, None)
    monkeypatch.setitem(prompts.__dict__, "_tokenizer", tokenizer)
    speaker = PreparedSpeaker(
        clip=Path("clip.wav"),
        ref=SpeakerRef(audio_sha256="0" * 64, segment=Segment.REGISTERED),
        mode=IN_CONTEXT,
        ref_text=SPOKEN,
        num_samples=48_001,
        sample_rate_hz=24_000,
    )
    made = prompts.prompt(speaker, "Hello.", "English")
    conditioning = made["additional_information"]["breeze_prompt"]
    assert conditioning["reference_frames"] == 26
    length = len(conditioning["target_ids"]) + len(conditioning["reference_ids"])
    assert len(made["prompt_token_ids"]) == length + 26 + 1
    assert "reference_waveform" not in made["additional_information"]


async def test_named_or_inline_a_clip_is_encoded_once(server):
    """The host encodes for every request, in its worker."""
    await check_encoded_once(server)
