"""The page at /voices: how it is served, and that its files fit one another."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from tests.node import syntax_errors
from vllm_tts_cache.entrypoints.http.page import ASSETS, PAGE, read_assets

FILES = read_assets()
PICTURES = sorted((Path(__file__).parents[2] / "docs" / "images").glob("page-*.png"))
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# What would take a voice's name for markup, or a text for code.
MARKUP = r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function)\b"


def text(name):
    return FILES[name].body.decode()


class Page(HTMLParser):
    """Elements and their attributes, and the names of the views, as a browser reads."""

    def __init__(self):
        super().__init__()
        self.elements = []
        self.views = []
        self.feed(text("index.html"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, given = self.elements[-1] if self.elements else ("", {})
        if tag == "a" and "data-view" in given and data.strip():
            self.views.append(data)

    def ids(self):
        return [given["id"] for _, given in self.elements if "id" in given]


def policy_of(answer):
    rules = answer.headers["content-security-policy"].split("; ")
    return {name: sources for name, *sources in map(str.split, rules)}


async def test_the_page_may_run_and_ask_nothing_but_its_own_server(server):
    answer = await server.client.get(PAGE)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == TYPES["html"]
    assert policy_of(answer) == {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "media-src": ["'self'", "blob:"],
        "connect-src": ["'self'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'none'"],
    }
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_file_has_its_type_and_is_sent_once(server):
    for name, file in FILES.items():
        url = f"{ASSETS}/{name}"
        first = await server.client.get(url)
        assert first.content == file.body
        assert first.headers["content-type"] == TYPES[name.rpartition(".")[2]]
        assert policy_of(first)["default-src"] == ["'none'"]
        head = await server.client.head(url)
        assert (head.status_code, head.content) == (200, b"")
        tag = first.headers["etag"]
        for known in (tag, f'"other", W/{tag}'):
            again = await server.client.get(url, headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
        changed = await server.client.get(url, headers={"If-None-Match": '"other"'})
        assert changed.status_code == 200


async def test_nothing_else_is_served(server):
    for name in (
        "missing.js",
        "../web_routes.py",
        "..%2fweb_routes.py",
        "%2e%2e/a",
        "",
    ):
        answer = await server.client.get(f"{ASSETS}/{name}")
        assert answer.status_code == 404
        assert b"import" not in answer.content


async def test_the_page_loads_without_a_key_and_its_requests_do_not(server):
    """The host's own guard: the page has to ask for the key, and sends it."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    server.app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    for path in (PAGE, f"{ASSETS}/app.js"):
        assert (await server.client.get(path)).status_code == 200
    refused = await server.client.get("/v1/audio/voices")
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    key = {"Authorization": "Bearer secret"}
    taken = await server.client.get("/v1/audio/voices", headers=key)
    assert taken.status_code == 200


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_in_the_docs_was_taken_with_the_views_that_there_are(path):
    """Else take them anew, as docs/voices-page.md says."""
    with Image.open(path) as picture:
        assert picture.info["Views"] == ", ".join(Page().views)


def test_every_file_that_is_named_exists_and_each_is_named():
    named = {"index.html"}
    for _, given in Page().elements:
        for url in (given.get("src"), given.get("href")):
            if url and not url.startswith("#"):
                assert url.startswith(f"{ASSETS[1:]}/"), url  # beside the page
                named.add(url.removeprefix(f"{ASSETS[1:]}/"))
    for script in SCRIPTS:
        named |= set(re.findall(r'from "\./([^"]+)"', text(script)))
        named |= set(re.findall(r'new URL\("([\w.-]+)", import\.meta', text(script)))
    assert named == set(FILES)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_parsed_and_makes_no_markup_of_texts(name):
    assert syntax_errors(FILES[name].body) == ""
    assert re.findall(MARKUP, text(name)) == []


def test_a_script_that_cannot_be_parsed_is_seen():
    assert "SyntaxError" in syntax_errors(b'import { a } from "./a.js"; const b = ;')


def test_ids_are_unique_and_those_that_scripts_ask_for_exist():
    ids = Page().ids()
    assert len(ids) == len(set(ids))
    everything = "".join(map(text, SCRIPTS))
    made = set(re.findall(r'\bid: "([\w-]+)"', everything))
    views = {f"view-{view}" for view in ("library", "add", "consents", "cache")}
    asked = set(re.findall(r'byId\("([\w-]+)"\)', everything)) | views
    assert asked <= set(ids) | made


def test_every_icon_that_is_shown_is_drawn():
    everything = "".join(map(text, SCRIPTS))
    shown = set(re.findall(r'\bicon\("(\w+)"', everything))
    shown |= set(re.findall(r'iconName: "(\w+)"', everything))
    shown |= {"play", "pause"}  # chosen between, in the player
    drawn = {i.removeprefix("i-") for i in Page().ids() if i.startswith("i-")}
    used = {
        given["href"].removeprefix("#i-")
        for tag, given in Page().elements
        if tag == "use" and "href" in given
    }
    assert shown <= drawn
    assert drawn == shown | used
