import pytest

from tests.catalogues import (  # noqa: F401  fixtures and a hook of all that follow
    engine,
    pytest_generate_tests,
)
from tests.store_samples import opened


@pytest.fixture
def open_here(tmp_path):
    stores = []

    def open_(**settings):
        stores.append(opened(tmp_path / "voices", **settings))
        return stores[-1]

    yield open_
    found = [store.verify() for store in stores]
    for store in stores:
        store.close()
    assert not any(found), found


@pytest.fixture
def store(open_here):
    return open_here()
