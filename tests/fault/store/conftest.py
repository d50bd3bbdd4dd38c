import tempfile
from pathlib import Path

import pytest

from tests.catalogues import engine, pytest_generate_tests  # noqa: F401


@pytest.fixture
def directory(tmp_path):
    """In memory where that is possible: a process that dies needs no fsync."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)
