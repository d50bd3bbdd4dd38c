"""Where the catalogues of features' tests are, and servers that several of them ask."""

import pytest

from tests.catalogues import engine, open_here, pytest_generate_tests  # noqa: F401


@pytest.fixture
async def host(environment, default_checkpoint, tmp_path, monkeypatch):
    """A server with two tenants, which have registered nothing."""
    from tests.two_tenants import two_tenants

    async with two_tenants(default_checkpoint, tmp_path, monkeypatch) as host:
        yield host


@pytest.fixture
async def served(environment, default_checkpoint, tmp_path, monkeypatch):
    """A server at a URL, for the command line."""
    from tests.contract.test_cli_voices import Served, serving

    made = Served(default_checkpoint, tmp_path / "speakers", monkeypatch)
    async with serving(made) as server:
        yield server
