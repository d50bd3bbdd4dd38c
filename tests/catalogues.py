"""Each test of a store runs on SQLite, on PostgreSQL, and some with a bucket.

A conftest that imports all of this has the tests below it parametrised, as far as they
open a store; one that is about SQLite's file, a server, a directory that has the truth,
or a bucket, has a mark that says so.
"""

import hashlib
from pathlib import Path

import pytest

from tests import store_samples
from tests.object_store import serving
from tests.postgres import Server, running

ENGINES = ("sqlite", "postgresql")
# A bucket has its catalogue on PostgreSQL.
ALL = (*ENGINES, "bucket")
_OF_STORES = ("tests/unit/store/",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    opens = "opened" in vars(metafunc.module)
    if not opens and not {"store", "open_here", "rig"} & set(metafunc.fixturenames):
        return
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if not (engines := [name for name in ALL if name in marks]):
        is_of_store = str(metafunc.definition.nodeid).startswith(_OF_STORES)
        has_bucket = is_of_store and "directory" not in marks
        engines = list(ALL if has_bucket else ENGINES)
    metafunc.parametrize("engine", engines, indirect=True)


@pytest.fixture(scope="session")
def postgres():
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def object_server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(autouse=True)
def engine(request, monkeypatch):
    """Where the stores of a test keep their catalogues, and their files."""
    name = getattr(request, "param", "sqlite")
    if name == "sqlite":
        yield name
        return
    server: Server = request.getfixturevalue("postgres")
    monkeypatch.setattr(store_samples, "catalogue_url_of", server.url_of)
    if name == "bucket":
        monkeypatch.setattr(store_samples, "store_url_of", bucket_of)
    yield name
    server.tidy()


def bucket_of(directory: Path) -> str:
    """A directory in the place of a bucket, beside that of a machine's copies."""
    hashed = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    return f"file://{directory.parent}/bucket-{hashed}"
