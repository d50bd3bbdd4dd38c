"""A voice of several clips, added and changed on the page, in a real browser."""

import pytest
from selenium.webdriver.common.keys import Keys

from tests.audio_clips import sndfile_bytes, voiced
from tests.browser import PHONE
from tests.contract.test_page_in_browser import visited
from tests.contract.test_speech import wav
from tests.speech_server import Server, running
from vllm_tts_cache.families.fish_speech.family import FAMILY as FISH

pytestmark = pytest.mark.long

ANN = "/v1/audio/voices/Ann"
ALL = FISH.max_clips


@pytest.fixture
async def server(tiny, tmp_path, monkeypatch):
    directory = tmp_path / "speakers"
    fish = Server(tiny(FISH), directory, monkeypatch, family=FISH)
    async with running(fish) as server:
        yield server


@pytest.fixture
def clips(tmp_path):
    made = [tmp_path / f"{number}.wav" for number in range(ALL + 1)]
    for number, path in enumerate(made):
        path.write_bytes(wav(seconds=2.0 + number / 8, pitch_hz=200.0 + 10 * number))
    return made


def clip(number, inside=""):
    return f".clip:nth-child({number}) {inside}"


async def shown(server):
    return (await server.client.get(ANN)).json()["voice"]


def fill_in(browser):
    """Give what a registration needs beside its clips."""
    browser.fill("[name=name]", "Ann")
    browser.fill("#consent-text", "yes")


async def test_several_clips_are_dropped_judged_and_registered_as_one_voice(
    server, clips
):
    def use(browser):
        browser.see("#list-empty")
        browser.drop("#main", *clips[:2])
        for number in (1, 2):
            browser.see(clip(number), f"{number - 1}.wav")
            browser.see(clip(number, ".verdict .figures"), "LUFS")
        fill_in(browser)
        browser.fill(clip(1, "[name=ref_text]"), "The words of one.")
        browser.click("#register")  # each has a transcript, or none
        assert browser.has_focus(clip(2, "[name=ref_text]:invalid"))
        browser.fill(clip(2, "[name=ref_text]"), "Those of two,\nin two lines.")
        assert browser.problems() == []
        browser.click("#register")
        browser.click("#try-new")
        browser.see("#detail .facts", "2.0 s, 2.1 s")
        browser.see("#detail .facts br + q", "Those of two, in two lines.")

    async with visited(server) as using:
        await using(use)
    voice = await shown(server)
    assert len(voice["clips"]) == 2
    assert voice["ref_text"] == "The words of one.\nThose of two, in two lines."


async def test_clips_are_added_and_taken_away_by_keyboard(server, clips):
    def use(browser):
        browser.open("add")
        browser.choose_file(clip(1, "input[type=file]"), clips[0])
        browser.see(clip(1), "0.wav")
        browser.tab_to("#more-clips")
        browser.press(Keys.ENTER)
        assert browser.has_focus(clip(2, "[data-act=choose]"))
        browser.choose_file(clip(2, "input[type=file]"), f"{clips[1]}\n{clips[2]}")
        browser.see(clip(3), "2.wav")
        browser.tab_to(clip(2, "[data-act=remove]"))
        browser.press(Keys.ENTER)
        browser.until(lambda: len(browser.all(".clip")) == 2, reason="not removed")
        assert browser.has_focus("#add-form *")
        browser.see(clip(2), "2.wav")
        browser.see(clip(2, "h3"), "Clip 2")
        fill_in(browser)
        browser.click("#register")
        browser.see("#add-progress", "Ann")

    async with visited(server) as using:
        await using(use)
    durations = [each["duration_seconds"] for each in (await shown(server))["clips"]]
    assert durations == [2.0, 2.25]


async def test_more_than_the_model_takes_are_left_and_that_is_said(server, clips):
    def use(browser):
        browser.open("add")
        browser.see("#model, #add-title")
        browser.drop(clip(1, ".drop"), *clips[:2])
        browser.see(clip(2), "1.wav")
        browser.drop(".brand", *clips[2:])
        browser.see(".toast", f"{ALL - 2} of {ALL - 1} files are taken")
        browser.see(clip(ALL), f"{ALL - 1}.wav")
        assert len(browser.all(".clip")) == ALL and not browser.all("#more-clips")
        assert not browser.is_too_wide() and browser.problems() == []

    async with visited(server, size=PHONE, is_dark=True) as using:
        await using(use)


async def test_what_is_wrong_of_one_clip_names_it_as_people_count(server, clips):
    clips[1].write_bytes(sndfile_bytes(voiced(16_000, 2.0), 16_000))

    def use(browser):
        browser.open("add")
        browser.drop(clip(1, ".drop"), *clips[:2])
        browser.see(clip(2), "1.wav")
        fill_in(browser)
        browser.click("#register")
        browser.see("#add-error [role=alert]", "clip 2 has a sample rate of 16000 Hz")

    async with visited(server) as using:
        await using(use)


async def test_a_voice_gets_other_clips_and_keeps_what_stands_beside_it(server, clips):
    first = await server.register(
        "Ann", wav(), ref_text="old", labels='{"team": "news"}', consent="on paper"
    )
    assert first.status_code == 200, first.text

    def use(browser):
        browser.click("[data-name=Ann] a")
        browser.click("#other-clips")
        browser.see("#name-note", "Registering replaces it")
        browser.drop(clip(1, ".drop"), *clips[:2])
        browser.see(clip(2), "1.wav")
        browser.fill(clip(1, "[name=ref_text]"), "one")
        browser.fill(clip(2, "[name=ref_text]"), "two")
        browser.click("#register")
        browser.click("#try-new")
        browser.click("#edit-voice")
        fields = browser.all("dialog textarea")
        assert [each.get_attribute("value") for each in fields] == ["one", "two"]
        fields[1].send_keys(", and more")
        assert browser.problems() == []
        browser.click("dialog .primary")
        browser.see("#detail .facts br + q", "two, and more")

    async with visited(server) as using:
        await using(use)
    voice = await shown(server)
    assert voice["id"] == first.json()["id"] and len(voice["clips"]) == 2
    assert (voice["labels"], voice["consent"]) == ({"team": "news"}, "on paper")
    assert voice["ref_text"] == "one\ntwo, and more"
