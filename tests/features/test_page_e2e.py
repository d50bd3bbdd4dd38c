"""What features add to the page, in a browser."""

import asyncio

import pytest

from tests.browser import Browser
from tests.e2e.test_voices_page import library, visit  # noqa: F401  fixtures
from tests.features.test_similarity import KEEPER, SAME, telling
from tests.speech_server import listening

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


def test_names_and_settings_are_edited(visit, library, client):  # noqa: F811
    browser = visit()
    browser.click("[data-name=Ann] a")
    browser.click("#edit-voice")
    browser.fill("dialog [name=aliases]", "alloy\nnova")
    browser.click("#settings summary")
    browser.fill("dialog [name=speed]", "0.9")
    browser.click("dialog button[type=submit]")
    browser.see("#detail .facts", "alloy, nova")
    browser.see("#detail .facts", "speed 0.9")
    voice = client.http.get("/v1/audio/voices/alloy").json()["voice"]
    assert (voice["name"], voice["settings"]) == ("Ann", {"speed": 0.9})
    browser.click("#edit-voice")
    browser.click("#settings summary")
    browser.fill("dialog [name=language]", "German")
    browser.click("dialog button[type=submit]")
    browser.see("#detail .facts", "language German")
    voice = client.http.get("/v1/audio/voices/alloy").json()["voice"]
    assert voice["settings"] == {"speed": 0.9, "language": "German"}
    assert voice["aliases"] == ["alloy", "nova"]


@telling
async def test_a_clip_that_sounds_like_a_voice_is_told_of(server, tmp_path):
    await server.register("Keeper", KEEPER)
    (clip := tmp_path / "clip.wav").write_bytes(SAME)

    def add(url):
        with Browser(url) as browser:
            browser.open("add")
            browser.choose_file("[data-clip=clip] input[type=file]", clip)
            browser.see(".clip .verdict", "sounds almost the same")
            browser.fill("[name=name]", "Other")
            browser.fill("#consent-text", "signed")
            browser.click("#register")
            browser.see("#add-progress", "sounds almost the same")

    async with listening(server.app) as port:
        await asyncio.to_thread(add, f"http://127.0.0.1:{port}")
