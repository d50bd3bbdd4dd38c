"""A test of a store runs on SQLite and a directory, unless a mark says otherwise.

Promises that a back end could break alone have the mark ``every_backend``: what a
database makes of types, texts, order, conflicts, time and locks, and a bucket of files
that are placed, removed and recovered. They run on SQLite and on PostgreSQL, and so
does whatever breaks things (``tests/fault``). Those of stores keep their files in a
directory there, and here in a bucket; with PostgreSQL and a directory they are long.
One that is about SQLite's file, a server, a directory that has the truth, or a bucket,
has a mark of that name, and runs there alone.

A conftest that imports all of this has the tests below it parametrised.
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
WITH_BUCKET = ("sqlite", pytest.param("postgresql", marks=pytest.mark.long), "bucket")
_OF_STORES, _OF_FAULTS = "tests/unit/store/", "tests/fault/"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if engines := [name for name in ALL if name in marks]:
        metafunc.parametrize("engine", engines, indirect=True)
    elif "every_backend" in marks or _breaks_a_store(metafunc):
        is_of_store = metafunc.definition.nodeid.startswith(_OF_STORES)
        has_bucket = is_of_store and "directory" not in marks
        engines = WITH_BUCKET if has_bucket else ENGINES
        metafunc.parametrize("engine", engines, indirect=True)


def _breaks_a_store(metafunc: pytest.Metafunc) -> bool:
    opens = "opened" in vars(metafunc.module)
    opens |= bool({"store", "open_here"} & set(metafunc.fixturenames))
    return opens and metafunc.definition.nodeid.startswith(_OF_FAULTS)


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


@pytest.fixture
def open_here(tmp_path):
    """Opens stores in one directory, sound when the test ends."""
    stores = []

    def open_(**settings):
        stores.append(store_samples.opened(tmp_path / "voices", **settings))
        return stores[-1]

    yield open_
    found = [store.verify() for store in stores]
    for store in stores:
        store.close()
    assert not any(found), found


def bucket_of(directory: Path) -> str:
    """A directory in the place of a bucket, beside that of a machine's copies."""
    hashed = hashlib.sha256(str(directory).encode()).hexdigest()[:8]
    return f"file://{directory.parent}/bucket-{hashed}"
