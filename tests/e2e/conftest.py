import pytest


@pytest.fixture
def keeper(client, make_clip):
    """The client of a server whose voice "keeper" is precomputed."""
    client.register("keeper", make_clip(), ref_text="Hello there.")
    client.precompute("keeper").raise_for_status()
    return client
