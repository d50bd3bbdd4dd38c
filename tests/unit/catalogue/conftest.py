import pytest

from vllm_tts_cache.catalogue.registry import Registry
from vllm_tts_cache.config import RegistrationPolicy


@pytest.fixture
def open_registry(tmp_path):
    opened: list[Registry] = []

    def open_(
        max_speakers: int = 0,
        policy: RegistrationPolicy = "overwrite",
        name="voices.sqlite3",
    ):
        registry = Registry(tmp_path / name, max_speakers=max_speakers, policy=policy)
        opened.append(registry)
        return registry

    yield open_
    for registry in opened:
        assert registry.verify() == []
        registry.close()


@pytest.fixture
def registry(open_registry):
    return open_registry()
