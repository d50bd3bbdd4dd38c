import pytest

from tests.store_samples import opened
from vllm_tts_cache.files import shared_file_system
from vllm_tts_cache.store import opening


@pytest.mark.sqlite
@pytest.mark.parametrize(("kind", "is_local"), [(None, True), ("NFS", False)])
def test_a_directory_that_hosts_may_share_is_warned_about(
    tmp_path, monkeypatch, plugin_log, kind, is_local
):
    monkeypatch.setattr(opening, "shared_file_system", lambda _: kind)
    store = opened(tmp_path)
    assert store.is_local is is_local
    assert (f"{tmp_path} is on NFS" in plugin_log.text) is not is_local
    store.close()


def test_the_file_system_of_a_directory_is_asked_for(tmp_path):
    assert shared_file_system(tmp_path) is None
    assert shared_file_system(tmp_path / "nowhere") is None
