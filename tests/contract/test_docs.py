"""The documentation says what the code says; `make docs` builds it, strictly."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from benchmarks import figures
from scripts.docs_hook import settings_page
from scripts.support_table import support_table
from tests.unit.test_cli import commands_of
from vllm_tts_cache.config import VARIABLES
from vllm_tts_cache.entrypoints.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]


def test_every_setting_is_in_the_reference():
    page = settings_page()
    assert all(variable in page for variable in VARIABLES)
    assert "Encodings a worker keeps in memory" in page and "512 MiB" in page
    shown = (DOCS / "settings.md").read_text()
    assert shown == page, f"docs/settings.md is to be:\n{page}"


def test_pages_name_only_settings_that_there_are():
    known = set(VARIABLES)
    for page in PAGES:
        named = set(re.findall(r"\bSPEAKER_[A-Z_]+[A-Z]\b", page.read_text()))
        # SPEAKER_URL is the command line's.
        others = {"SPEAKER_CACHE", "SPEAKER_URL"}
        assert named <= known | others, (page, named - known)


def anchors(page):
    for title in re.findall(r"^#+ (.*)$", page.read_text(), re.M):
        yield re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_links_lead_to_files_and_headings_of_the_repository():
    """Where pages are read as well; the site's own links are checked as it is built."""
    link = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)")
    for page in PAGES:
        for path, anchor in link.findall(page.read_text()):
            there = page.parent / path if path else page
            assert there.exists(), (page, path)
            assert not anchor or anchor in anchors(there), (page, anchor)


def shell_lines(page):
    """The commands of a page, each on one line, without what is behind #."""
    text = page.read_text()
    yield from re.findall(r"`((?:make|python -m|vllm-tts-cache) [^`]+)`", text)
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield from re.split(r"[|;&]+ |\$\(|#.*", line)


def test_commands_of_pages_and_their_options_are_those_that_there_are():
    root = get_command(app)
    known: dict[tuple[str, ...], Any] = {(): root, **dict(commands_of(root))}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    seen = 0
    for page in PAGES:
        for line in shell_lines(page):
            words = line.removeprefix(".venv/bin/").split()
            if words[:2] == ["python", "-m"]:
                assert find_spec(words[2]) is not None, (page, line)
            if words[:1] == ["make"]:
                assert set(words[1:2]) <= targets, (page, line)
            if words[:1] != ["vllm-tts-cache"]:
                continue
            path = tuple(words[1:3]) if tuple(words[1:3]) in known else (words[1],)
            command = known[() if words[1].startswith("-") else path]
            options = {name for each in command.params for name in each.opts}
            options |= {o for each in command.params for o in each.secondary_opts}
            given = {word for word in words if re.match("--[a-z]", word)}
            assert given <= options | {"--help"}, (page, line)
            seen += 1
    assert seen > 15


def test_the_hosts_of_the_readme_are_those_that_are_tested():
    assert support_table() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", figures.PAGES)
def test_figures_are_those_of_committed_results(page):
    text = (ROOT / page).read_text()
    assert figures.filled(text, figures.PAGES[page]) == text
