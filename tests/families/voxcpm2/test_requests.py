"""VoxCPM2 requests through the host's real routes, serving class and adapter."""

import asyncio
import json
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm_omni.model_executor.models.voxcpm2 import voxcpm2_talker as host

from tests.contract.test_speech import by_websocket, data_url, in_a_batch, wav
from tests.in_process_workers import SpectrumEncoder
from tests.speech_server import Server, running
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.families.voxcpm2.positions import num_positions
from vllm_tts_cache.families.voxcpm2.prompt import MODE, TEXT_IDS, PromptBuilder
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.encoding import Encoding

SPOKEN = "What is said in it."


class FeaturesEncoder(SpectrumEncoder):
    """``features`` of the audio's length."""

    def encode(self, audio):
        super().encode(audio)
        number = num_positions(audio.num_samples, audio.sample_rate_hz)
        return Encoding({"features": np.zeros((number, 4, 64), np.float32)})


def served(checkpoint, directory, monkeypatch, **config):
    encoders = [FeaturesEncoder(name) for name in FAMILY.encoders]
    return Server(
        checkpoint, directory, monkeypatch, encoders=encoders, family=FAMILY, **config
    )


@pytest.fixture
async def server(voxcpm2_checkpoint, tmp_path, monkeypatch):
    async with running(served(voxcpm2_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


def modes(server):
    """The mode of each request that reached the engine; None without a speaker."""
    told = [prompt["additional_information"] for prompt in server.engine.prompts]
    return [info.get(MODE) for info in told]


def message(answer):
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


async def ann(server, **fields):
    answer = await server.register("Ann", wav(), **fields)
    assert answer.status_code == 200, answer.text


async def test_a_prompt_is_as_long_as_the_hosts_and_holds_no_audio(
    server, voxcpm2_checkpoint
):
    from transformers import AutoTokenizer

    await ann(server)
    assert (await server.speak(voice="Ann")).status_code == 200
    assert (await server.speak(voice="Ann", ref_text=SPOKEN)).status_code == 200
    tokenizer = AutoTokenizer.from_pretrained(voxcpm2_checkpoint)
    split_map = host.build_cjk_split_map(tokenizer)
    for prompt, ref_text in zip(server.engine.prompts, (None, SPOKEN), strict=True):
        expected = host.build_voxcpm2_prompt(
            server.engine.model_config.hf_config,
            tokenizer,
            split_map,
            "Hello.",
            ref_audio=torch.zeros(48_000),
            ref_sr=24_000,
            ref_text=ref_text,
        )
        assert prompt["prompt_token_ids"] == expected["prompt_token_ids"]
        told = prompt["additional_information"]
        assert set(told) == {FIELD, MODE, TEXT_IDS}
        (hosts_ids,) = expected["additional_information"][TEXT_IDS]
        assert told[TEXT_IDS][0][-len(hosts_ids) :] == hosts_ids
        assert len(json.dumps(prompt)) < 4096


async def test_a_stored_transcript_is_used_only_where_the_request_says_so(server):
    await ann(server, ref_text=SPOKEN)
    for fields in (
        {},
        {"ref_text": SPOKEN},
        {"extra_params": {"clone_mode": "continuation"}},
        {"ref_text": SPOKEN, "extra_params": {"clone_mode": "reference"}},
        {},
    ):
        answer = await server.speak(voice="Ann", **fields)
        assert answer.status_code == 200, answer.text
    first, given, stored, named, last = server.engine.prompts
    assert modes(server) == [
        "reference",
        "continuation",
        "continuation",
        "reference",
        "reference",
    ]
    assert given == stored
    assert first == named == last
    assert len(given["additional_information"][TEXT_IDS][0]) > len("Hello.")


async def test_named_then_with_a_transcript_then_with_inline_audio(server):
    """Two of these requests ended stock's engine, and one never ended."""
    await ann(server)
    answers = [
        await server.speak(voice="Ann"),
        await server.speak(voice="Ann", ref_text=SPOKEN),
        await server.speak(voice="Ann", ref_audio=data_url(seconds=5.0)),
        await server.speak(voice="Ann", ref_audio=data_url(seconds=1.0)),
        await server.speak(voice="Ann"),
    ]
    assert [a.status_code for a in answers] == [200] * 5
    named, _, longer, shorter, again = server.engine.prompts
    assert named == again
    told = [p["additional_information"][FIELD] for p in server.engine.prompts]
    assert told[0] == told[1] == told[4]
    assert told[2][1] == told[3][1] == "inline"
    lengths = [len(p["prompt_token_ids"]) for p in (shorter, named, longer)]
    assert lengths == sorted(set(lengths))
    assert server.encodes == {"reference": 3, "continuation": 1}


async def test_a_message_does_not_grow_with_the_clip(server):
    sizes = []
    for seconds in (1.0, 29.0):
        await server.speak(ref_audio=data_url(seconds=seconds))
        prompt = server.engine.prompts[-1]
        sizes.append(len(repr(prompt["additional_information"])))
        assert len(json.dumps(prompt, separators=(",", ":"))) < 4096
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("speak", [in_a_batch, by_websocket])
async def test_a_voice_speaks_in_a_batch_and_on_a_websocket(server, speak):
    await ann(server, ref_text=SPOKEN)
    assert await speak(server, voice="Ann") is None
    assert await speak(server, voice="Ann", ref_text=SPOKEN) is None
    assert modes(server) == ["reference", "continuation"]
    assert "not registered" in str(await speak(server, voice="Bob"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"speaker_embedding": [0.5] * 64}, "not from an embedding"),
        ({"voice": "Ann", "x_vector_only_mode": True}, "x_vector_only_mode"),
        (
            {"voice": "Ann", "extra_params": {"clone_mode": "in_context"}},
            "continuation",
        ),
        (
            {"voice": "Ann", "extra_params": {"clone_mode": "continuation"}},
            "needs the transcript",
        ),
        ({"voice": "Bob"}, "not registered"),
        ({"ref_audio": "data:x"}, "reference audio"),
        ({"input": " "}, "empty"),
        ({"voice": "Ann", "input": " "}, "empty"),
    ],
)
async def test_what_the_family_cannot_do_is_a_400_that_says_so(server, wrong, says):
    await ann(server)
    assert says in message(await server.speak(**wrong))
    assert server.engine.prompts == []


async def test_an_embedding_is_no_voice(server):
    answer = await server.client.post(
        "/v1/audio/voices",
        data={"name": "raw", "consent": "c", "speaker_embedding": str([0.5] * 64)},
    )
    assert "audio_sample" in message(answer)


async def test_a_control_token_is_refused_in_every_text(server):
    """`<s>` at a text's beginning ended stock's engine."""
    await ann(server)
    for token in ("<s>", "<|ref_audio_start|>"):
        bad = f"{token}Hello."
        for answer in (
            await server.speak(input=bad),
            await server.speak(voice="Ann", input=bad),
            await server.speak(voice="Ann", ref_text=bad),
            await server.register("Bob", wav(), ref_text=bad),
        ):
            assert token in message(answer)
    assert server.engine.prompts == []
    assert (await server.speak(input="a <b> c, <speak>, < s >")).status_code == 200


async def test_a_text_without_a_voice_is_the_hosts(server):
    await ann(server)
    for fields in ({}, {"voice": "default"}):
        answer = await server.speak(**fields)
        assert (answer.status_code, answer.headers["X-Speaker-Cache"]) == (200, "none")
    one, other = server.engine.prompts
    assert one == other and set(one["additional_information"]) == {TEXT_IDS}


async def test_a_preset_of_the_operator_stays_the_hosts(
    voxcpm2_checkpoint, tmp_path, monkeypatch
):
    presets = tmp_path / "presets"
    write_preset(presets, "Narrator", num_positions=20)
    server = served(
        voxcpm2_checkpoint, tmp_path, monkeypatch, custom_voice_dir=str(presets)
    )
    async with running(server):
        assert (await server.speak(voice="Narrator")).status_code == 200
        told = server.engine.prompts[0]["additional_information"]
        assert told["voice_name"] == "narrator" and FIELD not in told
        assert told["voice_profile"]["ref_audio_feat_len"] == 20
        assert "built-in" in message(await server.register("narrator", wav()))
        given = await server.speak(voice="Narrator", ref_audio=data_url())
        assert given.status_code == 200 and modes(server) == [None, "reference"]


def write_preset(directory, name, num_positions):
    """As the host reads precomputed profiles."""
    directory.mkdir()
    save_file(
        {"ref_audio_feat": torch.zeros(num_positions, 4, 64)},
        directory / "preset.safetensors",
    )
    voices = {name: {"file": "preset.safetensors"}}
    manifest = {"model_type": "voxcpm2", "voices": voices}
    (directory / "custom_voice_manifest.json").write_text(json.dumps(manifest))


async def test_a_long_text_is_cut_into_tokens_off_the_event_loop(server, monkeypatch):
    await ann(server)
    here, is_here = threading.get_ident(), []
    clone = PromptBuilder.clone

    def seen(self, *args, **kwargs):
        is_here.append(threading.get_ident() == here)
        return clone(self, *args, **kwargs)

    monkeypatch.setattr(PromptBuilder, "clone", seen)
    for text in ("short", "long " * 1000):
        await asyncio.wait_for(server.speak(voice="Ann", input=text), 20)
    assert is_here == [True, False]
