"""What the page plays, draws and records, in a real browser.

Over the host's application in this process: what is spoken is silence, of any length.
"""

import numpy as np
import pytest
import torch

from tests.audio_clips import sndfile_bytes, voiced
from tests.contract.test_page_in_browser import visited
from tests.contract.test_speech import wav
from tests.speech_server import Server, running

pytestmark = pytest.mark.long

RECORD = "[data-clip=clip] [data-act=record]"

# The microphone as it is; what was opened is kept, and `allow()` ends the asking.
WATCH_MICROPHONE = """
const { mediaDevices } = navigator;
const ask = mediaDevices.getUserMedia.bind(mediaDevices);
window.opened = [];
const allowed = new Promise((allow) => { window.allow = allow; });
mediaDevices.getUserMedia = async (what) => {
  const stream = await ask(what);
  opened.push(stream);
  await allowed;
  return stream;
};
"""
LIVE = """
const tracks = opened.flatMap((stream) => stream.getTracks());
return tracks.filter(({ readyState }) => readyState === "live").length;
"""
COUNT_FRAMES = """
const next = requestAnimationFrame;
window.numFrames = 0;
window.requestAnimationFrame = (paint) => { numFrames += 1; return next(paint); };
"""


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


def let_speak(engine, *, seconds, breaks_off=False):
    """Have each of the engine's two chunks last so long, and fail behind them."""
    generate = engine.generate

    async def speak(**given):
        async for output in generate(**given):
            output.multimodal_output["audio"] = torch.zeros(round(seconds * 24_000))
            yield output
        if breaks_off:
            raise engine.error("the engine is gone")

    engine.generate = speak


def speak(browser):
    """Have a voice speak, and wait until all of it has arrived."""
    browser.click("[data-name=Ann] a")
    browser.see("#reference .player")
    browser.click("#speak")
    browser.see("#try-results", "Speech of")


def is_heard(browser):
    """Tell whether the loudspeaker is still given what was spoken."""
    _, before = browser.heard()
    browser.run("setTimeout(done, 1500)")
    _, after = browser.heard()
    return after != before


def can_stop(browser):
    return browser.see("#stop-speaking").is_enabled()


async def test_what_has_arrived_can_be_stopped_for_as_long_as_it_is_heard(server):
    await server.register("Ann", wav())
    let_speak(server.engine, seconds=0.75)

    def use(browser):
        speak(browser)
        assert can_stop(browser)
        browser.click("#stop-speaking")
        assert not can_stop(browser) and not is_heard(browser)
        sent, played = browser.heard()
        assert sent > played
        browser.click("#speak")
        browser.until(lambda: browser.heard()[1] == sent, reason="not played")
        browser.until(lambda: not can_stop(browser), reason="there is nothing to stop")

    async with visited(server) as using:
        await using(use)


async def test_what_is_played_next_silences_what_was_spoken(server):
    await server.register("Ann", wav(seconds=8.0))
    let_speak(server.engine, seconds=20)

    def use(browser):
        speak(browser)
        browser.click("#reference .player button")
        browser.see("#reference [aria-label^=Pause]")
        assert not can_stop(browser) and not is_heard(browser)
        browser.click("#speak")
        browser.see("#reference [aria-label^=Play]")
        assert can_stop(browser)

    async with visited(server) as using:
        await using(use)


async def test_a_stream_that_breaks_off_is_told_and_leaves_nothing_running(server):
    await server.register("Ann", wav())
    let_speak(server.engine, seconds=20, breaks_off=True)

    def use(browser):
        browser.click("[data-name=Ann] a")
        browser.see("#reference .player")
        browser.driver.execute_script(COUNT_FRAMES)
        browser.click("#speak")
        browser.see("#detail form [role=alert]", "broke off")
        assert not can_stop(browser) and not browser.all("canvas.live")
        browser.driver.execute_script("numFrames = 0")
        browser.run("setTimeout(done, 500)")
        assert browser.driver.execute_script("return numFrames") == 0

    async with visited(server) as using:
        await using(use)


async def test_a_clip_is_drawn_as_loud_as_it_is(server):
    swelling = voiced(seconds=4.0) * np.linspace(0, 1, 96_000)[:, None] ** 2
    await server.register("Ann", sndfile_bytes(swelling.astype(np.float32), 24_000))
    let_speak(server.engine, seconds=0.1)

    def use(browser):
        speak(browser)
        quiet, *_, loud = np.array_split(browser.drawn("#reference canvas"), 4)
        assert 0 < quiet.max() < 0.3 and 0.5 < loud.max() <= 1
        live = np.array(browser.drawn("canvas.live"))
        # Silence: bars that are as low as they get, as far as anything was spoken.
        assert 0 < live.max() < 0.1

    async with visited(server) as using:
        await using(use)


def live(browser):
    return browser.driver.execute_script(LIVE)


def watched(browser, is_allowed=True):
    """On the view where a voice is added, with an eye on the microphone."""
    browser.open("add")
    browser.driver.execute_script(WATCH_MICROPHONE)
    if is_allowed:
        browser.driver.execute_script("allow()")


async def test_leaving_ends_a_recording(server):
    def use(browser):
        watched(browser)
        browser.click(RECORD)
        browser.see("[role=timer]")
        assert live(browser) == 1
        browser.click("a[data-view=library]")
        browser.see("#list-empty")
        assert live(browser) == 0
        browser.click("a[data-view=add]")
        browser.see(RECORD)
        browser.click("input[value=recording]")
        browser.click("[data-clip=consent] [data-act=record]")
        browser.see("[role=timer]")
        assert live(browser) == 1
        browser.click("input[value=text]")
        assert live(browser) == 0

    async with visited(server) as using:
        await using(use)


async def test_record_pressed_twice_opens_one_microphone(server):
    def use(browser):
        watched(browser, is_allowed=False)
        button = browser.see(RECORD)
        button.click()
        button.click()
        browser.driver.execute_script("allow()")
        browser.see("[role=timer]")
        assert browser.driver.execute_script("return opened.length") == 1
        browser.click("[data-act=stop]")
        assert live(browser) == 0

    async with visited(server) as using:
        await using(use)


async def test_a_microphone_that_is_allowed_too_late_stays_off(server, tmp_path):
    clip = tmp_path / "clip.wav"
    clip.write_bytes(wav())

    def use(browser):
        watched(browser, is_allowed=False)
        browser.click(RECORD)
        browser.until(lambda: live(browser) == 1, reason="nobody was asked")
        browser.drop("[data-clip=clip] .drop", clip)
        browser.see("[data-clip=clip] .player")
        browser.driver.execute_script("allow()")
        browser.run("setTimeout(done, 1000)")
        assert live(browser) == 0
        assert browser.all("[data-clip=clip] .player")
        assert not browser.all("[role=timer]")

    async with visited(server) as using:
        await using(use)
