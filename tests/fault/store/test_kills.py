"""Kill -9 at any point: nothing acknowledged is lost, nothing deleted is left."""

import subprocess
import sys

import pytest

from tests.catalogues import ENGINES
from tests.fault.killing import Promised, check, killed
from tests.store_samples import settings_of

# Kills of one directory, one after another; then another directory begins.
_PER_DIRECTORY = 5


@pytest.fixture
def num_kills(pytestconfig):
    return int(pytestconfig.getoption("--kills"))


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_store_killed_again_and_again_stays_whole(tmp_path, num_kills, engine):
    promised = Promised()
    for seed in range(num_kills if engine == "sqlite" else num_kills // 2):
        life = tmp_path / f"life {seed // _PER_DIRECTORY}"
        if seed % _PER_DIRECTORY == 0:
            promised = Promised()
        print(f"seed {seed}")  # noqa: T201  shown if it fails
        lines = killed(life, seed)
        assert not any(line.startswith("failed") for line in lines), lines
        promised.learn(lines)
        check(life, promised)


@pytest.mark.parametrize("engine", ["bucket"], indirect=True)
def test_a_store_with_a_bucket_killed_often_stays_whole(tmp_path, num_kills, engine):
    del engine
    for first in range(0, num_kills // 2, _PER_DIRECTORY):
        life = tmp_path / f"life-{first}"
        urls = settings_of(life)
        given = [str(life), str(first), str(_PER_DIRECTORY)]
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "tests.fault.killing"),
                *(*given, urls.catalogue_url, urls.store_url),
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
