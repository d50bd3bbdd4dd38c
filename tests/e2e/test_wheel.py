"""The wheel, installed beside the host into an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from vllm_tts_cache.speaker.family import families

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 900

# What may lie directly in the package, beside modules.
FOLDERS = {
    *("audio", "catalogue", "entrypoints", "families", "model_executor", "offline"),
    *("platforms", "speaker", "stage_configs", "store"),
    # Test equipment, which `demo`, `serve` and `make-checkpoint` work with: who tries
    # the product has the wheel and nothing else. So do families' `tiny` folders.
    "testing",
}
# Where there may be something else than Python, and what: a folder -> ends of names.
OTHERS = {
    "entrypoints/web": {".css", ".html", ".js", ".svg"},
    "stage_configs": {".yaml"},
    "testing/clips": {".flac", ".md"},  # the demo's
    **{f"families/{family.name}": {".md"} for family in families()},
}


def run(*command, cwd):
    # Where the suite is told to find the checkout, the wheel is not to.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    options = "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel in it, that finds everything else in ours.

    What a path file names is searched, but no path file there is read: the checkout,
    which ours is linked to, is not found.
    """
    home = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", home, cwd=home.parent)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "host.pth").write_text(sysconfig.get_path("purelib"))
    options = "--no-deps", "--no-index", "--disable-pip-version-check", "-q"
    run(home / "bin" / "python", "-m", "pip", "install", *options, wheel, cwd=home)
    return home / "bin"


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def files_of(names):
    """Those of the package: their paths in it."""
    tops = {name.split("/")[0] for name in names}
    (metadata,) = tops - {"vllm_tts_cache"}
    assert metadata.endswith(".dist-info")
    package = [Path(n) for n in names if not n.startswith(metadata)]
    return [path.relative_to("vllm_tts_cache") for path in package]


def test_the_wheel_holds_no_folder_that_is_not_served(names):
    files = files_of(names)
    assert {path.parts[0] for path in files if len(path.parts) > 1} == FOLDERS
    packages = {path.parent for path in files if path.name == "__init__.py"}
    assert {path.parent for path in files} - packages == {Path("entrypoints/web")}


def test_the_wheel_holds_no_other_files_than_are_served(names):
    files = files_of(names)
    others = [path for path in files if path.suffix != ".py"]
    strays = [p for p in others if p.suffix not in OTHERS.get(str(p.parent), ())]
    assert strays == []
    assert {str(path.parent) for path in others} == set(OTHERS), "none is missing"
    for family in families():
        if family.deploy_file is not None:
            assert Path("stage_configs", family.deploy_file.name) in files


def test_a_server_speaks_from_the_wheel_alone(installed, tmp_path):
    where = "import vllm_tts_cache; print(vllm_tts_cache.__file__)"
    found = run(installed / "python", "-c", where, cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(installed.parent)
    told = run(installed / "vllm-tts-cache", "demo", cwd=tmp_path)
    assert "encodes" in told
    audio = list(tmp_path.rglob("*.wav"))
    assert audio and all(path.stat().st_size > 1000 for path in audio)
