import pytest

from tests.catalogues import engine, open_here, pytest_generate_tests  # noqa: F401


@pytest.fixture
def store(open_here):  # noqa: F811
    """Sound when the test ends."""
    store = open_here()
    yield store
    assert store.recover() == []
