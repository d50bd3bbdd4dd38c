"""How a voice speaks where a request does not say."""

import base64
from functools import partial

import httpx
import numpy as np
import pytest
import torch

from tests import speaking
from tests.cli_runs import run
from tests.contract.test_cli_voices import clip_bytes
from tests.in_process_workers import clip, decoded, new_speaker
from tests.speaking import BY_SOCKET, WAYS, by_commitment, refusal, registered, wav
from tests.speech_server import listening

VOICES = "/v1/audio/voices"
KEPT = {"temperature": 0.5, "seed": 7, "language": "German", "speed": 0.5}
LEVEL = 0.1


@pytest.fixture
def asked(server):
    """What the engine was asked to sample by; it speaks at one level."""
    seen, generate = [], server.engine.generate

    async def loudly(**given):
        seen.append(given["sampling_params_list"][0])
        async for output in generate(**given):
            output.multimodal_output["audio"] = torch.full((2_400,), LEVEL)
            yield output

    server.engine.generate = loudly
    return seen


async def change(server, name="Ann", **given):
    answer = await server.client.patch(f"{VOICES}/{name}", json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()["voice"]


def level(pcm):
    return np.abs(np.frombuffer(pcm, "<i2")).max() / 32_767


async def test_they_act_where_a_request_leaves_them_open(server, asked):
    await registered(server)
    assert (await change(server, settings=KEPT))["settings"] == KEPT
    for speak in WAYS:
        assert await refusal(speak, server, voice="Ann") is None
        assert (asked[-1].temperature, asked[-1].seed) == (0.5, 7)
        info = server.engine._info(server.engine.prompts[-1])
        # A session that commits names its language.
        expected = "English" if speak is by_commitment else "German"
        assert info["language"] == [expected]
    given = {"temperature": 0.9, "seed": 1, "language": "English", "speed": 1.0}
    plain = await server.speak(voice="Ann", response_format="pcm", **given)
    assert (asked[-1].temperature, asked[-1].seed) == (0.9, 1)
    slower = await server.speak(voice="Ann", response_format="pcm")
    assert len(slower.content) > 1.6 * len(plain.content)
    await change(server, settings=None)
    await server.speak(voice="Ann")
    assert asked[-1].seed is None


async def test_a_gain_is_of_one_voice_and_ends_at_full_scale(server, asked):
    await registered(server)
    await registered(server, "Bob", pitch_hz=210.0)
    async with (
        listening(server.app) as port,  # each request in a task of its own
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):

        async def said(**fields):
            body = {"input": "Hi.", "response_format": "pcm", **fields}
            return level((await client.post("/v1/audio/speech", json=body)).content)

        for gain_db, expected in ((6.0206, 2 * LEVEL), (-20, LEVEL / 10), (24, 1.0)):
            await change(server, settings={"gain_db": gain_db})
            for fields in ({}, {"stream_format": "audio"}):
                found = await said(voice="Ann", **fields)
                assert found == pytest.approx(expected, abs=1e-3)
                assert await said(voice="Bob", **fields) == pytest.approx(0.1, abs=1e-3)
        items = [{"input": "Hi.", "voice": name} for name in ("Ann", "Bob")]
        batch = {"items": items, "response_format": "pcm"}
        answer = await client.post("/v1/audio/speech/batch", json=batch)
    found = [base64.b64decode(each["audio_data"]) for each in answer.json()["results"]]
    assert list(map(level, found)) == pytest.approx([1.0, LEVEL], abs=1e-3)
    for speak in BY_SOCKET:
        assert await refusal(speak, server, voice="Ann") is None


@pytest.mark.parametrize("then", [None, {"seed": 8}])
async def test_a_replaced_voice_leaves_nothing_of_its_settings(server, asked, then):
    def replace(sha):
        speaking.lose_files(server, sha)
        named = new_speaker("Ann", clip(), extras={"settings": then})
        server.service.store.registrations.register(named, decoded(clip()))

    async for speak, sha in speaking.each_way(server):
        await change(server, settings=None)
        await server.speak(voice="Ann")
        default = asked[-1].temperature, (then or {}).get("seed")
        await change(server, settings=KEPT)
        server.engine.before_prefill = [partial(replace, sha)]
        await speak(server, voice="Ann", x_vector_only_mode=True)
        assert [(p.temperature, p.seed) for p in asked[-2:]] == [(0.5, 7), default]


WRONG = [{"speed": 9}, {"volume": 1}, {"seed": -1}, {"gain_db": "loud"}, [], "x", 5]
WRONG += [{"language": "Klingon"}, {"clone_mode": "opera"}, {"temperature": True}]


@pytest.mark.parametrize("settings", WRONG)
async def test_settings_that_cannot_be_are_a_400(server, settings):
    await registered(server)
    answer = await server.client.patch(f"{VOICES}/Ann", json={"settings": settings})
    assert answer.status_code == 400, answer.text
    assert "settings" in answer.json()["error"]["message"]
    assert "settings" not in (await server.client.get(f"{VOICES}/Ann")).json()["voice"]


async def test_the_command_line_and_a_bundle_have_them(served, tmp_path):
    file, sheet = tmp_path / "clip.wav", tmp_path / "voices.csv"
    file.write_bytes(clip_bytes())
    sheet.write_text('name,audio,consent,settings\nBob,clip.wav,yes,"{""seed"": 3}"\n')

    async def voices(*arguments):
        done = await run("voices", *arguments, url=served.url)
        assert done.status == 0, done.err
        return done.out

    told = "--setting", "speed=0.9", "--setting", "language=German"
    await voices("add", "Ann", file, "--consent", "yes", *told)
    assert "speed:0.9, language:German" in await voices("show", "Ann")
    await voices("export", "Ann", "--out", tmp_path / "a.voice")
    await voices("edit", "Ann", "--setting", "seed=4")
    assert "seed:4" in await voices("show", "Ann")
    await voices("import", tmp_path / "a.voice", "--on-conflict", "replace")
    assert "speed:0.9" in await voices("show", "Ann")
    await voices("add", "--manifest", sheet)
    assert "seed:3" in await voices("show", "Bob")
    await voices("edit", "Bob", "--clear", "settings")
    assert "settings" not in await voices("show", "Bob")


async def test_registering_anew_keeps_them(server):
    await registered(server)
    await change(server, settings={"seed": 1})
    again = await server.register("Ann", wav(pitch_hz=210.0))
    assert again.json()["voice"]["settings"] == {"seed": 1}
    other = await server.register("Ann", wav(), settings='{"gain_db": 3}')
    assert other.json()["voice"]["settings"] == {"gain_db": 3}
