"""A directory has one id, whatever leads to it and whoever opens it first."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_tts_cache import files
from vllm_tts_cache.store import binding
from vllm_tts_cache.store.binding import store_id_of


@pytest.mark.directory
def test_a_directory_keeps_its_id_whatever_it_is_called(open_here, tmp_path):
    first = open_here().store_id
    assert len(first.id) == 32
    assert open_here().store_id == first
    (tmp_path / "mounted").symlink_to(tmp_path / "voices")
    mounted = store_id_of(tmp_path / "mounted")
    assert mounted.id == first.id
    assert mounted.place != first.place


def test_processes_that_open_a_new_directory_at_once_agree(tmp_path):
    barrier = threading.Barrier(8)

    def open_one(_):
        barrier.wait()
        binding.mark(tmp_path)
        return store_id_of(tmp_path).id

    with ThreadPoolExecutor(8) as pool:
        (seen,) = set(pool.map(open_one, range(8)))
    assert seen
    assert [path.name for path in tmp_path.iterdir()] == [binding.ID_FILE_NAME]


def test_a_directory_that_takes_no_id_is_like_any_other(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files, "write_private", refuse)
    binding.mark(tmp_path)
    assert store_id_of(tmp_path).id == ""


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_a_spoilt_marker_says_nothing(tmp_path, content):
    (tmp_path / binding.ID_FILE_NAME).write_bytes(content)
    binding.mark(tmp_path)
    assert store_id_of(tmp_path).id == ""
