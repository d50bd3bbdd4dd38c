import pytest


@pytest.fixture(scope="module")
def stage_config(default_checkpoint):
    """Of the default family's talker, for the host's own scheduler."""
    from tests.families.cases import default_case
    from tests.real_scheduler import stage_config_of

    return stage_config_of(default_case(), default_checkpoint)


@pytest.fixture
def speakers(tmp_path):
    """A worker's, with one encoder."""
    from tests.in_process_workers import SpectrumEncoder, worker_speakers

    speakers = worker_speakers(tmp_path, [SpectrumEncoder("codec")])
    yield speakers
    speakers.close()


@pytest.fixture
def ref(tmp_path):
    """Of a clip that is stored there."""
    from tests.in_process_workers import clip, store_clip
    from tests.store_samples import opened

    store = opened(tmp_path)
    yield store_clip(store, clip())
    store.close()
