"""Names and settings of a voice on the page, in a browser."""

import pytest

from tests.e2e.test_voices_page import library, visit  # noqa: F401  fixtures

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
