"""The page at /voices in a browser, on the real server."""

import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from selenium.webdriver.common.keys import Keys

from tests.audio_clips import sndfile_bytes, voiced
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
SECONDS = f"{soundfile.info(SPEECH.path).duration:.1f}"


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    folder = Path(PICTURES) if PICTURES else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)

    def take(browser, name):
        path = folder / f"page-{name}.png"
        browser.save(path)
        # Held against the page as it is: a view that is not in a picture is noticed.
        views = PngInfo()
        names = (view.text for view in browser.all(".top nav a"))
        views.add_text("Views", ", ".join(names))
        with Image.open(path) as taken:  # a third of the bytes, and looks the same
            small = taken.convert("RGB").quantize(200)
            small.save(path, optimize=True, pnginfo=views)
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
    visit, library, client, picture
):
    browser = visit()
    browser.see("#voice-list .pill.ready")
    browser.click("a[data-view=add]")
    browser.choose_file("[data-clip=clip] input[type=file]", SPEECH.path)
    browser.see("[data-clip=clip]", f"{SECONDS} s")
    assert judged(browser) in ("good", "fair")
    browser.fill("[name=name]", "ann")
    browser.see("#name-note", "There is a voice Ann")
    browser.fill("[name=name]", "Keeper")
    browser.fill("[name=ref_text]", SPEECH.transcript)
    browser.fill("#add-labels input", "use: harbour")
    browser.fill("#consent-text", "signed 2026-11-22")
    browser.driver.execute_script("scrollTo(0, 0)")
    picture(browser, "add")
    browser.click("#register")
    browser.see("#add-progress[data-status=ready]", "Keeper is ready")
    browser.click("#try-new")
    browser.see("#detail #voice-title", "Keeper")
    browser.see("#detail .voice-head .pill.ready")
    shown = client.http.get("/v1/audio/voices/Keeper").json()["voice"]
    assert (
        shown["labels"] == {"use": "harbour"} and shown["ref_text"] == SPEECH.transcript
    )
    browser.see("#reference .player time", f"0:0{SECONDS}")
    browser.click("#speak")
    assert speak(browser) > 10_000
    browser.click("#speak")  # once more: the first text of a server warms it up
    speak(browser)
    assert "First audio after" in browser.see("#try-results", "cache hit").text
    picture(browser, "voice")
    browser.click("#delete-voice")
    browser.see("#removes", f"its reference clip ({SECONDS} s")
    browser.click("dialog .danger")
    browser.see(".toast", "Keeper is deleted")
    assert client.http.get("/v1/audio/voices/Keeper").status_code == 404
    gone = "[data-name=Keeper]"
    browser.until(lambda: not browser.all(gone), reason="it is still listed")


def test_what_is_recorded_is_what_was_heard(visit, tmp_path, client):
    tone = voiced(48_000, 6.0, pitch_hz=440)[:, 0]
    microphone = tmp_path / "microphone.wav"
    microphone.write_bytes(sndfile_bytes(tone, 48_000))
    browser = visit(microphone=microphone)
    browser.open("add")
    browser.click("[data-clip=clip] [data-act=record]")
    level = browser.see("[data-clip=clip] [role=meter]")
    browser.until(
        lambda: int(level.get_attribute("aria-valuenow")) > 50, reason="no level"
    )
    browser.until(
        lambda: "0:03" in browser.see("[role=timer]").text, reason="no three seconds"
    )
    browser.click("[data-act=stop]")
    browser.see("[data-clip=clip] .player")
    assert "lighthouse" in browser.see("[name=ref_text]").get_attribute("value")
    browser.fill("[name=name]", "Recorded")
    browser.fill("#consent-text", "spoken by the one who is cloned")
    browser.click("#register")
    browser.see("#add-progress", "Recorded")
    audio = client.http.get("/v1/audio/voices/Recorded/audio")
    samples, rate = soundfile.read(BytesIO(audio.content))
    assert 2.5 < len(samples) / rate < 6
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    assert abs(spectrum.argmax() * rate / len(samples) - 440) < 5
    assert np.abs(samples).max() == pytest.approx(0.5, rel=0.1)
    client.http.delete("/v1/audio/voices/Recorded")


def test_a_consent_recording_is_kept_and_stood_on(visit, client, tmp_path):
    browser = visit()
    browser.open("add")
    browser.choose_file("[data-clip=clip] input[type=file]", SPEECH.path)
    browser.fill("[name=name]", "Consenting")
    browser.click("input[value=recording]")
    browser.fill("#consent-name", "Ann's consent")
    said = tmp_path / "consent.wav"
    said.write_bytes(sndfile_bytes(voiced(24_000, 2.0, pitch_hz=211), 24_000))
    browser.choose_file("[data-clip=consent] input[type=file]", said)
    browser.click("#keep-consent")
    browser.see("#consent-recording", "Ann's consent")
    browser.click("#register")
    browser.see("#add-progress[data-status=ready]")
    voice = client.http.get("/v1/audio/voices/Consenting").json()["voice"]
    assert voice["consent_id"].startswith("cons_")
    client.http.delete("/v1/audio/voices/Consenting")
    client.http.delete(f"/v1/audio/voice_consents/{voice['consent_id']}")


def test_a_voice_is_previewed_saved_as_a_file_and_imported(
    visit, library, client, tmp_path
):
    browser = visit(downloads=tmp_path)
    browser.click("[data-name=Ann] a")
    browser.see(".voice-head .pill.ready")
    browser.click("#make-preview")
    browser.see("#detail .hint", "Made just now, and kept.")
    browser.click("#save-bundle")
    file = tmp_path / "Ann.voice"
    browser.until(file.exists, reason="no bundle came")
    gone = client.http.delete("/v1/audio/voices/Ann")
    assert gone.status_code == 200, gone.text
    browser.click("#open-import")
    browser.choose_file("#bundle-files", file)
    browser.click("dialog .primary")
    browser.see(".toast", "Imported Ann. What was encoded came along.")
    browser.see("[data-name=Ann] .pill.ready")
    browser.click("#open-import")
    browser.choose_file("#bundle-files", file)
    browser.click("dialog .primary")
    browser.see("dialog [role=alert]", "Ann.voice: ")
    browser.press(Keys.ESCAPE)


def test_a_voice_is_found_tried_changed_and_deleted_by_keyboard(visit, library, client):
    browser = visit()
    browser.see("[data-name=Chidi]")
    browser.press(Keys.TAB)
    assert browser.has_focus("#skip")
    browser.press(Keys.ENTER)
    assert browser.has_focus("main")
    browser.tab_to("#search")
    browser.press("chi")
    browser.until(lambda: len(browser.all("#voice-list li")) == 1, reason="not found")
    browser.tab_to("#voice-list a")
    browser.press(Keys.ENTER)
    browser.see("#voice-title", "Chidi")
    assert browser.has_focus("#voice-title")
    browser.tab_to("#edit-voice")
    browser.press(Keys.ENTER)
    assert browser.has_focus("dialog input")
    browser.press(Keys.END, " the second", Keys.ENTER)
    browser.see("#voice-title", "Chidi the second")
    browser.tab_to("#try-text")
    browser.press(Keys.END, " And the gulls are quiet.")
    browser.tab_to("#speak")
    browser.press(Keys.ENTER)
    assert speak(browser) > 10_000
    browser.tab_to("#delete-voice")
    browser.press(Keys.ENTER)
    browser.see("dialog", "Delete Chidi the second?")
    browser.press(Keys.ESCAPE)
    assert browser.has_focus("#delete-voice")
    browser.press(Keys.ENTER)
    browser.tab_to("dialog .danger")
    browser.press(Keys.ENTER)
    browser.see(".toast", "Chidi the second is deleted")
    assert client.http.get("/v1/audio/voices/Chidi the second").status_code == 404


def test_a_stream_can_be_stopped(visit, library):
    browser = visit()
    browser.click("[data-name=Ann] a")
    browser.fill("#try-text", "The tide is out, and the boats are resting. " * 20)
    browser.click("#speak")
    browser.until(lambda: sum(browser.heard()), reason="no sample arrived")
    browser.click("#stop-speaking")
    browser.see("#try-results", "Stopped.")
    sent, _ = browser.heard()
    browser.click("#speak")
    browser.until(lambda: browser.heard()[0] not in (0, sent), reason="not once more")


def test_a_phone_shows_one_thing_at_a_time(visit, library, picture):
    browser = visit(size=PHONE)
    browser.see("#voice-list .pill.ready")
    assert not browser.is_too_wide() and not browser.all("#detail")
    picture(browser, "phone")
    browser.click("[data-name=Ann] a")
    browser.see("#voice-title", "Ann")
    assert not browser.is_too_wide() and not browser.all("#voice-list")
    browser.click(".back")
    browser.see("#voice-list")
    for view in ("add", "consents", "cache"):
        browser.open(view)
        browser.see(f"#view-{view}")
        assert not browser.is_too_wide()


@pytest.mark.parametrize("is_dark", (False, True), ids=("light", "dark"))
@pytest.mark.parametrize("size", (DESKTOP, PHONE), ids=("desktop", "phone"))
def test_nothing_keeps_people_from_using_it(
    visit, library, microphone, picture, size, is_dark
):
    browser = visit(size=size, is_dark=is_dark, microphone=microphone)
    browser.see("#voice-list .pill.ready")
    assert browser.problems() == []
    browser.click("#open-import")
    browser.see("dialog #bundle-files")
    assert browser.problems() == []
    browser.press(Keys.ESCAPE)
    browser.click("[data-name=Ann] a")
    browser.see("#reference .player")
    browser.click("#speak")
    speak(browser)
    assert browser.problems() == []
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


def test_what_axe_finds_is_seen(visit):
    browser = visit()
    browser.see("#voice-list, #list-empty")
    browser.driver.execute_script(
        "document.getElementById('search').labels[0].remove()"
    )
    browser.driver.execute_script(
        "document.querySelector('.model').replaceChildren(document.createElement('input'))"
    )
    assert {found for found, *_ in browser.problems()} == {"label"}
