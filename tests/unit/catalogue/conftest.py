import pytest

from tests.catalogues import engine, open_here, pytest_generate_tests  # noqa: F401


@pytest.fixture
def store(open_here):  # noqa: F811
    return open_here()
