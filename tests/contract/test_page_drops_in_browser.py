"""What becomes of files that are dropped on the page, in a real browser."""

import pytest

from tests.contract.test_page_in_browser import visited
from tests.contract.test_speech import wav
from tests.speech_server import Server, running

pytestmark = pytest.mark.long

CLIP = "[data-clip=clip]"


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


@pytest.fixture
def clips(tmp_path):
    made = [tmp_path / "one.wav", tmp_path / "two.wav"]
    for seconds, path in enumerate(made, start=2):
        path.write_bytes(wav(seconds=seconds))
    return made


async def test_a_clip_that_is_dropped_anywhere_begins_a_voice(server, clips):
    def use(browser):
        browser.see("#list-empty")
        browser.drop("#main", clips[0], until="dragOver")
        browser.see("#drop-here", "Drop a clip")
        browser.drop("#main", clips[0])
        browser.see(CLIP, "one.wav · 2.0 s")
        assert browser.driver.current_url.endswith("#/add")
        assert not browser.all("#drop-here") and not browser.all(".toast")
        browser.drop(f"{CLIP} .player", clips[1])
        browser.see(CLIP, "two.wav · 3.0 s")

    async with visited(server) as using:
        await using(use)


@pytest.mark.parametrize("place", ("#main", f"{CLIP} .drop"))
async def test_of_several_clips_one_is_taken_and_that_is_said(server, clips, place):
    def use(browser):
        browser.open("add" if "drop" in place else "")
        browser.drop(place, *clips)
        browser.see(".toast", "Only one.wav is taken: this model takes one clip")
        browser.see(CLIP, "one.wav")
        assert len(browser.all(".clip")) == 1 and not browser.all("#more-clips")

    async with visited(server) as using:
        await using(use)


@pytest.mark.parametrize("view", ("", "add"))
async def test_a_bundle_is_imported_wherever_it_is_dropped(
    server, clips, tmp_path, view
):
    await server.register("Ann", wav())
    bundle = tmp_path / "Ann.voice"
    answer = await server.client.get("/v1/audio/voices/Ann/bundle")
    bundle.write_bytes(answer.content)
    gone = await server.client.delete("/v1/audio/voices/Ann")
    assert gone.status_code == 200

    def use(browser):
        browser.open(view)
        browser.drop(f"{CLIP} .drop" if view else "#main", bundle, clips[0])
        browser.see(".toast", "Drop clips by themselves")
        browser.see("dialog", "Ann.voice")
        assert browser.problems() == []
        browser.click("dialog .primary")
        browser.see(".toast", "Imported Ann.")
        assert not browser.all(f"{CLIP} .player")

    async with visited(server) as using:
        await using(use)
    assert (await server.client.get("/v1/audio/voices/Ann")).status_code == 200


async def test_of_an_archive_it_is_said_what_takes_it(server, tmp_path):
    archive = tmp_path / "voices.tar"
    archive.write_bytes((await server.client.get("/v1/audio/voice_archive")).content)

    def use(browser):
        browser.drop("#main", archive)
        browser.see("dialog", "vllm-tts-cache voices import FILE")
        browser.click("dialog button")
        browser.click("#open-import")
        browser.see("dialog .primary")
        assert browser.problems() == []
        browser.choose_file("#bundle-files", archive)
        browser.click("dialog .primary")
        browser.see("dialog [role=alert]", "vllm-tts-cache voices import FILE")

    async with visited(server) as using:
        await using(use)
