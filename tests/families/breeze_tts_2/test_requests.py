"""Breeze-TTS-2 requests through the host's real routes, serving class and adapter."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import soundfile
from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest
from vllm_omni.entrypoints.openai.tts_adapters.breeze_tts_2 import BreezeTTS2Adapter
from vllm_omni.model_executor.stage_input_processors.breeze_tts_2 import (
    expand_cfg_prompts,
)

from tests.families.breeze_tts_2.case import CASE, Tokenizer
from tests.families.serving import message, served
from tests.speaking import data_url, wav
from tests.two_tenants import two_tenants
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.families.breeze_tts_2.family import IN_CONTEXT
from vllm_tts_cache.families.breeze_tts_2.prompt import BreezePrompts, PromptBuilder
from vllm_tts_cache.offline import PreparedSpeaker
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef

SPOKEN = "What is said in it."


def hosts_prompt(server, audio=None, **fields):
    """What the host sends for the same clip."""
    adapter = server.handler._get_tts_adapter()
    spoken = None if audio is None else SPOKEN
    request = OpenAICreateSpeechRequest(input="Hello.", ref_text=spoken, **fields)
    sampling = server.engine.default_sampling_params_list[0]
    reference = None if audio is None else soundfile.read(io.BytesIO(audio))
    hosts: Any = BreezeTTS2Adapter
    return hosts._build_prompt(adapter, request, sampling, reference)


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
    for mine, other in zip(
        expand_cfg_prompts(made, None), expand_cfg_prompts(expected, None), strict=True
    ):
        ours: Any = mine.prompt
        theirs: Any = other.prompt
        assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
        assert FIELD in ours["additional_information"]


async def test_a_label_is_still_one_in_letters_of_any_size(server):
    for label in ("S1", "s1"):
        assert (await server.speak(voice=label)).status_code == 200
        made = server.engine.prompts[-1]
        assert FIELD not in made["additional_information"]
        expected = hosts_prompt(server, voice="S1")
        assert made["additional_information"] == expected["additional_information"]
    assert "S1" in message(await server.register("S1", wav(), ref_text=SPOKEN))


async def test_text_without_a_voice_is_the_hosts(server):
    for fields in ({}, {"voice": "default"}):
        assert (await server.speak(**fields)).status_code == 200
    expected = hosts_prompt(server)
    for made in server.engine.prompts:
        assert made["prompt_token_ids"] == expected["prompt_token_ids"]
        assert made["additional_information"] == expected["additional_information"]


async def warmed_up(server):
    """The prompts that the host warms up with, and what is stored behind it."""
    CASE.serve(server)
    await server.handler.warmup()
    made = [prompt["additional_information"] for prompt in server.engine.prompts]
    assert len(made) == 5
    assert not any(FIELD in told or "reference_waveform" in told for told in made)
    assert server.encodes == {"codec": 0}
    assert list(server.directory.glob("store/**/*.safetensors")) == []


async def test_a_warm_up_clones_nobody(server):
    """The host clones its own speech, for a reference encoder that is not used here."""
    await warmed_up(server)
    assert (await server.speak(ref_audio=data_url(), ref_text=SPOKEN)).is_success
    assert FIELD in server.engine.prompts[-1]["additional_information"]


async def test_a_server_of_tenants_warms_up(own_checkpoint, tmp_path, monkeypatch):
    """Nobody calls yet, so there is no tenant whose clone it could be."""
    make = partial(served, CASE)
    async with two_tenants(own_checkpoint, tmp_path, monkeypatch, make) as host:
        await warmed_up(host.server)


def test_an_offline_prompt_is_the_hosts_too(monkeypatch):
    prompts = BreezePrompts("nowhere", {}, lambda *_: pytest.fail("needs none"))
    monkeypatch.setitem(prompts.__dict__, "_builder", PromptBuilder(Tokenizer()))
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
