"""What tests of one family have at hand: its case, checkpoint, talker and server."""

# The process that hands tests to xdist's workers imports this first, and no host.
from functools import cache

import pytest

from tests.families.cases import case_of
from vllm_tts_cache.speaker.family import families


@pytest.fixture(scope="session", autouse=True)
def tokenizers_are_read_once():
    """Each server reads its own: a second of every test, and the same one each time."""
    from transformers import AutoTokenizer

    read, known = AutoTokenizer.from_pretrained, {}

    def remembered(*given, **options):
        key = repr((given, options))
        if key not in known:
            known[key] = read(*given, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", staticmethod(remembered))
        yield


@pytest.fixture(scope="module")
def own_case(request):
    """That of the family in whose folder the test is."""
    folder = request.path.parent.name
    return next(case_of(family) for family in families() if family.name == folder)


@pytest.fixture(scope="module")
def own_checkpoint(own_case, tiny, tmp_path_factory):
    """Its tiny checkpoint, or what there is in the place of one; do not write to it."""
    if own_case.write is None:
        return tiny(own_case.family)
    checkpoint = tmp_path_factory.mktemp(own_case.name) / "checkpoint"
    own_case.write(checkpoint, tiny)
    return checkpoint


@pytest.fixture(scope="module")
def one_thread():
    """As the encode thread has: on several, a CPU encodes without slices."""
    from tests.torch_threads import on_threads

    with on_threads(1):
        yield


def load(case, checkpoint):
    import torch

    return case.family.part("encoders_part")(checkpoint, torch.device("cpu"))


@pytest.fixture(scope="module")
def encoders(own_case, own_checkpoint):
    """Its reference encoders by name; do not change them."""
    return load(own_case, own_checkpoint)


@pytest.fixture(scope="session")
def encoders_of(tiny):
    """Those of a case's tiny checkpoint."""
    return cache(lambda case: load(case, tiny(case.family)))


@pytest.fixture(scope="module")
def talker(own_case, own_checkpoint, tmp_path_factory):
    """As a worker has it; what its requests leave behind is a test's to tidy."""
    from tests.real_talker import loaded_talker

    directory = tmp_path_factory.mktemp("talker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(directory / "samples"))
        options = own_case.loading
        if own_case.stand_in is not None:
            loaded = own_case.stand_in(directory / "samples")
        else:
            loaded = loaded_talker(own_case, own_checkpoint, directory, **options)
        with loaded as model:
            yield model


@pytest.fixture
async def server(own_case, own_checkpoint, tmp_path, monkeypatch):
    """Its API process; stand-ins encode."""
    from tests.families.serving import served
    from tests.speech_server import running

    made = served(own_case, own_checkpoint, tmp_path / "speakers", monkeypatch)
    async with running(made) as server:
        own_case.serve(server)
        yield server
