"""Clients whose code cannot be installed here speak by the requests that they send.

Home Assistant's integration is sfortis/openai_tts of October 2026; SillyTavern's and
Vapi's requests are those of their documentation.
"""

import pytest

from tests.speaking import registered

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"


async def test_home_assistant_lists_voices_and_speaks(server):
    await registered(server)
    answer = (await server.client.get(VOICES)).json()
    # It takes the first of these that is not empty, and an id or a text of each.
    found = answer.get("items") or answer.get("data") or answer.get("voices")
    assert [each["id"] for each in found] == ["Ann"]
    said = {"model": "m", "input": "Hello.", "voice": found[0]["id"], "speed": 1.0}
    for name in ("mp3", "opus", "wav"):
        heard = await server.client.post(SPEECH, json={**said, "response_format": name})
        assert (heard.status_code, heard.headers["X-Speaker-Cache"]) == (200, "hit")


async def test_silly_tavern_speaks_by_an_alias(server):
    await registered(server)
    await server.client.patch(f"{VOICES}/Ann", json={"aliases": ["alloy"]})
    body = {"model": "m", "input": "Hello.", "voice": "alloy", "speed": 1}
    spoken = await server.client.post(SPEECH, json={**body, "response_format": "mp3"})
    assert (spoken.status_code, spoken.headers["content-type"]) == (200, "audio/mpeg")


async def test_a_model_that_is_not_served_is_a_404_that_says_what_to_do(server):
    await registered(server)
    server.handler.models.is_base_model = "m".__eq__
    server.handler.models.base_model_paths = []  # which 0.32 names
    body = {"model": "tts-1", "input": "Hello.", "voice": "Ann"}
    missing = await server.client.post(SPEECH, json=body)
    assert missing.status_code == 404
    assert "--served-model-name tts-1" in missing.json()["error"]["message"]


def asked(**changed):
    wanted = {"type": "voice-request", "text": "Hello.", "sampleRate": 8_000}
    return {"message": {**wanted, "timestamp": 1, "call": {"id": "c"}, **changed}}


@pytest.mark.parametrize("rate_hz", [8_000, 24_000, 44_100])
async def test_vapi_hears_pcm_at_its_rate(server, rate_hz):
    await registered(server)
    body = asked(sampleRate=rate_hz)
    spoken = await server.client.post("/v1/vapi/Ann", json=body)
    assert (spoken.status_code, spoken.headers["X-Speaker-Cache"]) == (200, "hit")
    assert spoken.headers["X-Audio-Sample-Rate"] == str(rate_hz)
    assert len(spoken.content) / 2 == pytest.approx(0.2 * rate_hz, rel=0.02)
    body["message"]["call"] = {"transcript": "x" * 300_000}
    assert (await server.client.post("/v1/vapi/Ann", json=body)).status_code == 200


WRONG = ({"sampleRate": 1}, {"sampleRate": "x"}, {"text": ""}, {"type": "end"})
WRONG += ({"text": "x" * 40_000}, {"text": None})


@pytest.mark.parametrize("changed", WRONG)
async def test_what_vapi_does_not_send_is_refused(server, changed):
    await registered(server)
    answer = await server.client.post("/v1/vapi/Ann", json=asked(**changed))
    assert answer.status_code in (400, 422), answer.text
    assert (await server.client.post("/v1/vapi/Bob", json=asked())).status_code == 400
