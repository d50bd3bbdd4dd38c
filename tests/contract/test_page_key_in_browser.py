"""How the page asks for the API key of a server that wants one, in a real browser."""

import pytest
from selenium.webdriver.common.keys import Keys
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from tests.contract.test_page_in_browser import visited
from tests.contract.test_speech import wav
from tests.speech_server import Server, running

pytestmark = pytest.mark.long

ASKS = "wants its API key"


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        server.app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
        server.client.headers["Authorization"] = "Bearer secret"
        yield server


async def test_the_key_is_asked_for_sent_and_kept_in_the_tab(server):
    await server.register("Ann", wav())

    def use(browser):
        browser.see("dialog", ASKS)
        assert browser.problems() == []
        browser.press("wrong", Keys.ENTER)
        browser.see("dialog [role=alert]", "refused that key")
        browser.press("secret", Keys.ENTER)
        browser.see("[data-name=Ann]")
        browser.open("cache")
        browser.see(".worker")
        browser.driver.refresh()
        browser.see(".worker")
        assert not browser.all("dialog")
        browser.click("a[data-view=library]")
        browser.click("[data-name=Ann] a")
        browser.see("#reference .player")  # which a player could not have fetched
        browser.click("#forget-key")
        browser.see("dialog", ASKS)
        browser.press(Keys.ESCAPE)
        browser.see("[role=alert]", "Unauthorized")

    async with visited(server) as using:
        await using(use)


async def test_whoever_gives_no_key_is_asked_again_only_for_what_they_do(server):
    await server.register("Ann", wav())

    def use(browser):
        browser.see("dialog", ASKS)
        browser.press(Keys.ESCAPE)
        browser.see("#list-error [role=alert]", "Unauthorized")
        browser.click("a[data-view=cache]")
        browser.see("dialog", ASKS)
        browser.press(Keys.ESCAPE)
        browser.see("#cache-error [role=alert]", "Unauthorized")
        browser.run("setTimeout(done, 5000)")  # in which it was refreshed twice
        assert not browser.all("dialog")
        browser.click("#cache-error button")
        browser.see("dialog", ASKS)
        browser.press("secret", Keys.ENTER)
        browser.see(".worker")

    async with visited(server) as using:
        await using(use)


async def test_nobody_is_asked_for_what_the_page_does_by_itself(server):
    def use(browser):
        browser.see("dialog", ASKS)
        browser.press("secret", Keys.ENTER)
        browser.click("a[data-view=cache]")
        browser.see(".worker")
        # Refused from now on, as by a server that was started with another key.
        browser.driver.execute_script("sessionStorage.clear()")
        browser.see("#cache-error [role=alert]", "Unauthorized")
        assert not browser.all("dialog")

    async with visited(server) as using:
        await using(use)
