"""The wheel, installed beside the host into an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 900


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
    """Made of the sdist, as a release makes it; tests are in neither."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "-o", out, ROOT, cwd=out)
    (sdist,), (built,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.split("/")[1] for name in archive.getnames()}
    assert not names & {"tests", "benchmarks", ".github"}
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """It has the wheel, and finds all else in ours, but no checkout that is linked."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", home, cwd=home.parent)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "host.pth").write_text(sysconfig.get_path("purelib"))
    options = "--no-deps", "--no-index", "--disable-pip-version-check", "-q"
    run(home / "bin" / "python", "-m", "pip", "install", *options, wheel, cwd=home)
    return home / "bin"


def test_a_server_speaks_from_the_wheel_alone(installed, tmp_path):
    where = "import vllm_tts_cache; print(vllm_tts_cache.__file__)"
    found = run(installed / "python", "-c", where, cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(installed.parent)
    told = run(installed / "vllm-tts-cache", "demo", cwd=tmp_path)
    assert "encodes" in told
    audio = list(tmp_path.rglob("*.wav"))
    assert audio and all(path.stat().st_size > 1000 for path in audio)
