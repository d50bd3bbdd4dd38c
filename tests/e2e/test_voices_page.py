"""The page at /voices in a browser, on the real server."""

import os
from pathlib import Path

import pytest
import soundfile
from PIL import Image
from selenium.webdriver.common.keys import Keys

from tests.audio_clips import sndfile_bytes
from tests.browser import DESKTOP, PHONE, Browser
from vllm_tts_cache.testing.clips import SPEECH

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

# Pictures of the docs are taken where this names their folder.
PICTURES = os.environ.get("TTS_CACHE_TEST_PICTURES")
PICTURE_MAX_BYTES = 100_000

LIBRARY = (
    ("Ann", {"gender": "female", "use": "news"}, "en-GB", "bright, quick"),
    ("Bo Lindqvist", {"gender": "male", "use": "audiobook"}, "sv", "low and slow"),
    ("Chidi", {"gender": "male", "use": "news"}, "en-NG", "calm"),
    ("Éloïse", {"gender": "female", "use": "audiobook"}, "fr", "soft"),
)
# What a stranger may have called a voice, and written beside it.
EVIL = "<img src=x onerror=\"document.title='taken'\">"
NUM_SPOKEN = """
const asked = performance.getEntriesByType("resource");
return asked.filter(({ name }) => name.endsWith("/v1/audio/speech")).length;
"""
SECONDS = f"{soundfile.info(SPEECH.path).duration:.1f}"


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    folder = Path(PICTURES) if PICTURES else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)

    def take(browser, name):
        path = folder / f"page-{name}.png"
        browser.save(path)
        with Image.open(path) as taken:  # a third of the bytes, and looks the same
            taken.convert("RGB").quantize(200).save(path, optimize=True)
        assert 5_000 < path.stat().st_size < PICTURE_MAX_BYTES

    return take


@pytest.fixture
def visit(client, shared_server):
    """Opens browsers; in the end nothing has left the server or gone wrong unseen."""
    opened = []

    def open_page(**form):
        opened.append(Browser(shared_server.url, **form))
        return opened[-1]

    yield open_page
    for browser in opened:
        asked = browser.requested()
        assert f"{shared_server.url}/voices/assets/app.js" in asked
        ours = (shared_server.url, "blob:", "data:")
        assert [url for url in asked if not url.startswith(ours)] == []
        # Failed requests are the page's to show: what it says of them is seen in tests.
        said = [each for each in browser.complaints() if "Failed to load" not in each]
        browser.driver.quit()
        assert said == []


@pytest.fixture
def library(client, make_clip):
    for name, labels, language, description in LIBRARY:
        answer = client.register(
            name,
            make_clip(),
            labels=str(labels).replace("'", '"'),
            language=language,
            speaker_description=description,
            ref_text=SPEECH.transcript,
            precompute="true",
        )
        assert answer.status_code == 200, answer.text
    yield
    for name, *_ in LIBRARY:
        client.http.delete(f"/v1/audio/voices/{name}")


@pytest.fixture
def microphone(tmp_path):
    path = tmp_path / "microphone.wav"
    path.write_bytes(sndfile_bytes(*soundfile.read(SPEECH.path, dtype="float32")))
    return path


def judged(browser):
    """What the server says of the clip, before anything is registered."""
    verdict = browser.see(".clip .verdict").get_attribute("data-verdict")
    browser.see(".clip .figures", "dBFS")
    return verdict


def speak(browser):
    """Have it say something; returns the samples that were sent to the loudspeaker."""
    browser.until(lambda: sum(browser.heard()), reason="no sample arrived")
    browser.see("#try-results", "Speech of")

    def is_over():
        sent, played = browser.heard()
        return sent == played

    browser.until(is_over, reason="it is still playing")
    return browser.heard()[0]


def test_a_voice_of_a_file_is_judged_added_tried_and_deleted(
    visit, library, client, make_clip, picture
):
    # Another file's voice on this server: registering would ask whether to replace it.
    client.http.delete("/v1/audio/voices/keeper")
    browser = visit()
    browser.see("#voice-list .pill.ready")
    browser.click("a[data-view=add]")
    browser.choose_file("[data-clip=clip] input[type=file]", SPEECH.path)
    browser.see("[data-clip=clip]", f"{SECONDS} s")
    assert judged(browser) in ("good", "fair")
    browser.fill("[name=name]", "ann")
    browser.see("#name-note", "There is a voice Ann")
    browser.fill("[name=ref_text]", SPEECH.transcript)
    browser.fill("#add-labels input", "use: harbour")
    browser.fill("#consent-text", "signed 2026-11-22")
    browser.click("#register")
    browser.click("dialog[open] .actions button")  # Replace Ann? Cancel
    browser.fill("[name=name]", "Keeper")
    browser.driver.execute_script("scrollTo(0, 0)")
    picture(browser, "add")
    browser.click("#register")
    browser.see("#add-progress[data-status=ready]", "Keeper is ready")
    browser.click("#try-new")
    browser.see("#detail #voice-title", "Keeper")
    browser.see("#detail .voice-head .pill.ready")
    shown = client.http.get("/v1/audio/voices/Keeper").json()["voice"]
    assert shown["labels"] == {"use": "harbour"}
    assert shown["ref_text"] == SPEECH.transcript
    browser.see("#reference .player time", f"0:0{SECONDS}")
    browser.click("#speak")
    assert speak(browser) > 10_000
    browser.click("#speak")  # once more: the first text of a server warms it up
    speak(browser)
    assert "First audio after" in browser.see("#try-results", "cache hit").text
    picture(browser, "voice")
    for _ in range(2):
        browser.click("#try-again .player button")
        browser.see("#try-again [aria-label^=Pause]")
        browser.see("#try-again [aria-label^=Play]")
    assert browser.driver.execute_script(NUM_SPOKEN) == 2  # and not once more
    browser.click("#delete-voice")
    browser.see("#removes", f"its reference clip ({SECONDS} s")
    browser.click("dialog .danger")
    browser.see(".toast", "Keeper is deleted")
    assert client.http.get("/v1/audio/voices/Keeper").status_code == 404
    gone = "[data-name=Keeper]"
    browser.until(lambda: not browser.all(gone), reason="it is still listed")
    words = {"speaker_description": EVIL, "labels": '{"<b>x": "<i>y"}'}
    client.register("<b onclick=1>#?&%2e", make_clip(), ref_text=EVIL, **words)
    browser.driver.refresh()
    browser.click("[data-name^='<b'] a")
    browser.see("#voice-title", "<b onclick=1>#?&%2e")
    browser.see("#detail .facts q", EVIL)
    browser.see("#detail .facts", "<b>x: <i>y")
    browser.click("#delete-voice")
    browser.see("dialog h2", "Delete <b onclick=1>#?&%2e?")
    markup = "main b[onclick], main img, main q > *, main .chip b, dialog b"
    assert browser.all(markup) == [] and browser.driver.title != "taken"
    browser.click("dialog .danger")
    browser.see(".toast", "is deleted")


@pytest.mark.parametrize("is_dark", (False, True), ids=("light", "dark"))
@pytest.mark.parametrize("size", (DESKTOP, PHONE), ids=("desktop", "phone"))
def test_anybody_can_use_it(visit, library, microphone, picture, size, is_dark):
    browser = visit(size=size, is_dark=is_dark, microphone=microphone)
    browser.see("#voice-list .pill.ready")
    assert browser.problems() == [] and not browser.is_too_wide()
    if size == PHONE and not is_dark:
        picture(browser, "phone")
    browser.click("#open-import")
    browser.see("dialog #bundle-files")
    assert browser.problems() == []
    browser.press(Keys.ESCAPE)
    browser.click("[data-name=Ann] a")
    browser.see("#reference .player")
    browser.click("#speak")
    speak(browser)
    assert browser.problems() == [] and not browser.is_too_wide()
    if is_dark and size == DESKTOP:
        picture(browser, "dark")
    for opener in ("#edit-voice", "#delete-voice"):
        browser.click(opener)
        browser.see("dialog[open]")
        assert browser.problems() == []
        browser.press(Keys.ESCAPE)
    browser.open("add")
    browser.click("input[value=recording]")
    browser.see("#consent-name")
    browser.click("[data-clip=clip] [data-act=record]")
    browser.see("[role=timer]", "0:02")  # a clip of less than a second is refused
    assert browser.problems() == []
    browser.click("[data-act=stop]")
    judged(browser)
    assert browser.problems() == []
    browser.open("consents")
    browser.see("#consents-title")
    assert browser.problems() == []
    browser.open("cache")
    browser.see(".worker")
    assert browser.problems() == []
    if size == DESKTOP and not is_dark:
        picture(browser, "cache")
