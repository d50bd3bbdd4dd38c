"""What keeps a release from being made by mistake."""

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from vllm_tts_cache import __version__
from vllm_tts_cache.entrypoints.cli import main

ROOT = Path(__file__).parents[2]
MEASURED, FIGURES = "vllm_tts_cache/plugin.py", "docs/performance.md"


@pytest.fixture
def checkout(tmp_path):
    """A repository of the files that the script looks at, ready for a release."""
    for name in ("scripts/release.sh", "vllm_tts_cache/__init__.py", MEASURED, FIGURES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "CHANGELOG.md").write_text(f"## [{__version__}] - 2026-12-01\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    measured = git(tmp_path, "rev-parse", "--short=7", "HEAD")
    (tmp_path / FIGURES).write_text(f"revision {measured}")
    commit(tmp_path)
    return tmp_path


def git(checkout, *arguments):
    who = "-c", "user.name=Ann", "-c", "user.email=ann@example.com"
    return subprocess.check_output(["git", *who, *arguments], cwd=checkout, text=True)


def commit(checkout):
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "x")


def check(checkout):
    command = ["bash", "scripts/release.sh", "--check"]
    options = {"cwd": checkout, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    return done.returncode, done.stderr


def test_the_version_names_the_hosts(capsys):
    assert main(["--version"]) == 0
    installed = metadata.version("vllm-omni")
    assert capsys.readouterr().out == f"{__version__} (vllm-omni {installed})\n"


def test_a_checkout_that_is_ready_is_not_refused(checkout):
    assert check(checkout) == (0, "")


def changed(checkout, name, text):
    (checkout / name).write_text(text)
    commit(checkout)
    return check(checkout)[1]


def test_what_is_not_ready_is_refused_with_the_reason(checkout):
    (checkout / "new").touch()
    assert check(checkout)[0] == 1 and "has changes" in check(checkout)[1]
    commit(checkout)
    git(checkout, "tag", f"v{__version__}")
    assert "is tagged already" in check(checkout)[1]
    dirty = f"{(checkout / FIGURES).read_text()} (dirty)"
    assert "of a tree with changes" in changed(checkout, FIGURES, dirty)
    assert "figures of another revision" in changed(checkout, MEASURED, "")
    assert "no line '## [" in changed(checkout, "CHANGELOG.md", f"## [{__version__}]\n")
    init = "vllm_tts_cache/__init__.py", '__version__ = "next"\n'
    assert "has the version 'next'" in changed(checkout, *init)
