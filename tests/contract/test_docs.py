"""The documentation is built, strictly, and says what the code says."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from scripts.docs_hook import settings_page
from tests.unit.test_error_statuses import ERRORS
from vllm_tts_cache.config import VARIABLES
from vllm_tts_cache.entrypoints.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# What these say is the caller's own words.
OTHERS_WORDS = {
    "SpeakerRequestError",
    "StorageError",
    "EncodeError",
    "WorkerRPCError",
    "ForeignStoreError",
    "UnsupportedModelError",
    "WorkerBusyError",
    "EncodeTimeoutError",
    "GoneError",
    "ConfigError",
    "NoCatalogueError",
    "CheckpointError",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-d",
        str(out),
    ]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "CI": "true"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def text_of(site, page):
    return re.sub(r"<[^>]+>", "", (site / page).read_text())


def test_every_setting_is_in_the_reference():
    page = settings_page()
    assert all(variable in page for variable in VARIABLES)
    assert "Encodings a worker keeps in memory" in page and "512 MiB" in page
    shown = (DOCS / "settings.md").read_text()
    assert shown == page, f"docs/settings.md is to be:\n{page}"


def test_every_route_of_ours_is_in_the_reference(site):
    from vllm_tts_cache.entrypoints.attach import is_api_route, routers

    told = text_of(site, "reference/http-schema.html")
    for router in routers():
        for route in filter(is_api_route, router.routes):
            for method in route.methods:
                assert f"{method} {route.path}" in told


def every_command(command, context, path=()):
    """Yield a command and all below it, each with the words that call it."""
    yield path, command
    if isinstance(command, TyperGroup):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            yield from every_command(below, context, (*path, name))


def test_every_command_is_in_the_reference_with_all_that_its_help_says(site):
    page = html.unescape((site / "reference/commands.html").read_text())
    sections = re.split(r'<h2 id="', page)
    told = {
        re.sub(r"<[^>]+>", "", section.split(">", 1)[1].split("¶")[0]): re.sub(
            r"<[^>]+>", "", section
        )
        for section in sections[1:]
    }
    root = get_command(app)
    found = list(every_command(root, typer.Context(root)))
    assert len(found) > 15
    for path, command in found:
        section = told[" ".join(("vllm-tts-cache", *path))]
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                for name in parameter.opts if parameter.opts[0][0] == "-" else ():
                    assert name in section, (path, name)
                help_text = getattr(parameter, "help", None) or ""
                assert help_text.replace("`", "") in section, (path, help_text)
        _, _, examples = (command.epilog or "").partition("Examples:")
        for line in examples.splitlines():
            assert line.strip() in section, (path, line)
    assert "interrupted (Ctrl-C)" in sections[0]


def test_a_reader_needs_nobody_else(site):
    """No page has a reader's browser fetch anything from elsewhere."""
    fetched = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*="(https?:[^"]+)')
    for page in site.rglob("*.html"):
        assert fetched.findall(page.read_text()) == [], page


def test_every_error_is_explained():
    guide = (DOCS / "guides" / "troubleshoot.md").read_text()
    phrases = [
        row.split("|")[1].strip() for row in guide.splitlines() if row.startswith("| ")
    ]
    for error, _, _ in ERRORS:
        if type(error).__name__ in OTHERS_WORDS:
            continue
        assert any(phrase in str(error) for phrase in phrases), str(error)


def test_pages_name_only_settings_that_there_are():
    known = set(VARIABLES)
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md"]:
        named = set(re.findall(r"\bSPEAKER_[A-Z_]+[A-Z]\b", page.read_text()))
        # SPEAKER_URL is the command line's.
        others = {"SPEAKER_CACHE", "SPEAKER_URL"}
        assert named <= known | others, (page, named - known)


def test_links_lead_to_files_of_the_repository():
    """Where pages are read as well; the site's own links are checked as it is built."""
    link = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)")
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        for path in link.findall(page.read_text()):
            assert (page.parent / path).exists(), (page, path)


def test_pages_name_only_files_that_there_are():
    """But for those of others, and what is of a revision that is named."""
    named = re.compile(r"`([\w.-]+/[\w./-]+\.(?:py|sh))`(?! of revision)")
    others = {DOCS / "comparison.md", *(DOCS / "upstream").iterdir()}
    ours = {*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - others
    for page in ours:
        for path in named.findall(page.read_text()):
            places = (ROOT, ROOT / "vllm_tts_cache")
            assert any((place / path).exists() for place in places), (page, path)
