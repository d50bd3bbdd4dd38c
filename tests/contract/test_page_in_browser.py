"""What the page does with strangers' words and errors, in a real browser.

Over the host's application in this process: no test here needs a voice to be heard.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser import PHONE, Browser
from tests.contract.test_speech import wav
from tests.speech_server import Server, listening, running

pytestmark = pytest.mark.long

EVIL = "<img src=x onerror=\"document.title='taken'\">"
BEA = "Bea's"


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


@asynccontextmanager
async def visited(server, **how):
    """A way to use a browser on it: functions of the browser, run in a thread."""
    async with listening(server.app) as port:
        url = f"http://127.0.0.1:{port}"
        opened = await asyncio.to_thread(Browser, url, **how)

        async def using(work):
            return await asyncio.to_thread(work, opened)

        try:
            yield using
        finally:
            await asyncio.to_thread(opened.driver.quit)


async def test_words_of_strangers_stay_words(server):
    fields = {
        "speaker_description": EVIL,
        "ref_text": EVIL,
        "labels": '{"<b>x": "<i>y"}',
        "consent": EVIL,
    }
    answer = await server.register("<b onclick=1>#?&%2e", wav(), **fields)
    assert answer.status_code == 200, answer.text

    def use(browser):
        browser.click("#voice-list a")
        browser.see("#voice-title", "<b onclick=1>#?&%2e")
        browser.see("#detail .facts q", EVIL)
        browser.see("#detail .facts", "<b>x: <i>y")
        browser.see("#reference .player")
        browser.click(".chips button")
        browser.see("#voice-list", "<b onclick=1>")
        browser.click("#delete-voice")
        browser.see("dialog h2", "Delete <b onclick=1>#?&%2e?")
        assert browser.driver.title != "taken"
        markup = "main b[onclick], main img, main q > *, main .chip b, dialog b"
        assert browser.all(markup) == []
        browser.click("dialog .danger")
        browser.see("#list-empty")

    async with visited(server) as using:
        await using(use)


async def test_consent_recordings_are_listed_and_one_that_nobody_stands_on_deleted(
    server,
):
    consents, ids = "/v1/audio/voice_consents", {}
    for name in (EVIL, BEA):
        file = {"recording": ("c.wav", wav(seconds=2.0 + len(ids)), "audio/wav")}
        form = {"name": name, "language": "de"}
        kept = await server.client.post(consents, data=form, files=file)
        ids[name] = kept.json()["id"]
    await server.register("Ann", wav(), consent=ids[EVIL])

    def use(browser):
        browser.click("a[data-view=consents]")
        assert browser.has_focus("#consents-title")
        browser.see("#consent-list", EVIL)
        assert browser.all("#consent-list img") == []
        assert browser.problems() == []
        browser.click(f"[data-consent='{ids[EVIL]}'] button")
        browser.see("dialog h2", EVIL)
        browser.click("dialog .danger")
        browser.see("dialog [role=alert]", "Voices stand on the consent recording")
        browser.see("dialog ul a", "Ann")
        assert browser.problems() == []
        browser.press(Keys.ESCAPE)
        # By the keyboard alone.
        browser.tab_to(f"[data-consent='{ids[BEA]}'] button")
        browser.press(Keys.ENTER)
        browser.see("dialog h2", BEA)
        browser.tab_to("dialog .danger")
        browser.press(Keys.ENTER)
        browser.see(".toast", "is deleted")
        there = f"[data-consent='{ids[BEA]}']"
        browser.until(lambda: not browser.all(there), reason="it is still listed")
        title = "#consents-title"
        browser.until(lambda: browser.has_focus(title), reason="the focus is lost")

    async with visited(server) as using:
        await using(use)
    left = (await server.client.get(consents)).json()["data"]

    def look(browser):
        browser.open("consents")
        browser.see("#consent-list", EVIL)
        assert browser.problems() == [] and not browser.is_too_wide()

    async with visited(server, size=PHONE, is_dark=True) as using:
        await using(look)
    assert [each["id"] for each in left] == [ids[EVIL]]


async def test_errors_of_the_server_are_shown_as_they_are(server, tmp_path):
    silence = tmp_path / "silence.wav"
    silence.write_bytes(wav(peak=0.0))
    refused = await server.register("Silent", silence.read_bytes())
    message = refused.json()["error"]["message"]

    def use(browser):
        browser.open("add")
        browser.click("#register")  # the browser itself asks for a name first
        assert browser.has_focus("[name=name]:invalid")
        browser.fill("[name=name]", "Silent")
        browser.click("#register")
        browser.see("[data-clip=clip] [role=alert]", "Record a clip first")
        browser.choose_file("[data-clip=clip] input[type=file]", silence)
        browser.fill("#consent-text", "yes")
        browser.click("#register")
        browser.see("#add-error [role=alert]", message)
        browser.open("voices/voice_nobody")
        browser.see("#detail [role=alert]", "voice_nobody")

    async with visited(server) as using:
        await using(use)


async def test_that_clips_are_kept_back_is_no_failure(
    default_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPEAKER_AUDIO_DOWNLOAD", "0")
    closed = Server(default_checkpoint, tmp_path, monkeypatch)

    def use(browser):
        browser.click("[data-name=Ann] a")
        browser.see("#reference .hint", "does not give reference audio back")
        assert browser.all("#detail [role=alert]") == []

    async with running(closed), visited(closed) as using:
        await closed.register("Ann", wav())
        await using(lambda browser: browser.driver.refresh())
        await using(use)


async def test_a_long_library_comes_in_pages_and_only_what_is_seen_is_asked_about(
    server,
):
    clip = wav()
    for number in range(120):
        await server.register(f"voice {number:03}", clip, labels='{"n": "1"}')

    def use(browser):
        browser.see("[data-name='voice 000'] .pill", "not encoded")
        browser.run("setTimeout(done, 3000)")
        asked = {url for url in browser.requested() if url.endswith("/cache")}
        num_rows = len(browser.driver.find_elements("css selector", "#voice-list li"))
        assert 0 < len(asked) < num_rows / 2 and num_rows < 120
        for _ in range(3):
            last = browser.driver.find_elements("css selector", "#voice-list a")[-1]
            browser.driver.execute_script("arguments[0].scrollIntoView()", last)
            browser.run("setTimeout(done, 500)")
        browser.see("[data-name='voice 119']")
        browser.fill("#search", "voice 07")
        browser.until(lambda: len(browser.all("#voice-list li")) == 10, reason="not 10")
        browser.see("#num-voices", "10")

    async with visited(server) as using:
        await using(use)


async def test_a_voice_becomes_ready_under_ones_eyes(server):
    for encoder in server.encoders:
        encoder.gate.clear()
    await server.register("Ann", wav(), precompute="true")

    def see(text):
        def use(browser):
            browser.see("[data-name=Ann] .pill", text)

        return use

    async with visited(server) as using:
        await using(see("encoding"))
        for encoder in server.encoders:
            encoder.gate.set()
        await using(see("ready"))
