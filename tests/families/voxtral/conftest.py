import pytest

from tests.families.voxtral.tiny_checkpoint import write_voxtral_checkpoint


@pytest.fixture(scope="session")
def voxtral_checkpoint(tmp_path_factory):
    """A tiny checkpoint as released, without the encoder; do not write to it."""
    return write_voxtral_checkpoint(tmp_path_factory.mktemp("voxtral"))


@pytest.fixture(scope="session")
def voxtral_with_encoder(tmp_path_factory):
    """The same with the reference encoder, which no released checkpoint has."""
    directory = tmp_path_factory.mktemp("voxtral-with-encoder")
    return write_voxtral_checkpoint(directory, with_encoder=True)
