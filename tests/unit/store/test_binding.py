"""A catalogue on a server and a directory know each other, and nobody else."""

import shutil

import pytest

from tests.store_samples import address, opened, publish, register, settings_of
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.errors import ConfigError, StorageError
from vllm_tts_cache.store import binding
from vllm_tts_cache.store.opening import open_existing, open_store

pytestmark = pytest.mark.postgresql


@pytest.fixture
def voices(tmp_path, postgres):
    url = postgres.url_of(tmp_path)
    store = opened(tmp_path / "voices", catalogue_url=url)
    register(store, "Ann")
    publish(store)
    store.close()
    return tmp_path / "voices", url


def whole(directory, url):
    store = opened(directory, catalogue_url=url)
    assert store.recover() == store.verify() == []
    found = store.find("Ann")
    assert found is not None and found.fingerprints
    assert store.read_audio(address()) is not None
    store.close()


def test_another_directory_is_refused_and_says_whose_the_catalogue_is(voices):
    directory, url = voices
    with pytest.raises(ConfigError, match=f"of the files in .*{directory}") as caught:
        opened(directory.parent / "other", catalogue_url=url)
    assert "share one directory" in str(caught.value)
    with pytest.raises(ConfigError, match="another directory"):
        open_existing(settings_of(directory.parent / "third", catalogue_url=url))
    whole(directory, url)


def test_another_catalogue_is_refused_and_no_file_is_removed(voices, postgres):
    directory, url = voices
    other = postgres.url_of(directory / "another")
    for _ in range(2):
        with pytest.raises(ConfigError, match="of another voice catalogue"):
            opened(directory, catalogue_url=other)
    whole(directory, url)


def test_a_catalogue_in_the_directory_is_not_begun_beside_that_on_a_server(voices):
    directory, url = voices
    for open_ in (open_store, open_existing):
        with pytest.raises(ConfigError, match="set SPEAKER_CATALOGUE_URL"):
            open_(settings_of(directory, catalogue_url=""))
    assert not (directory / FILE_NAME).exists()
    whole(directory, url)


def test_a_directory_that_has_a_catalogue_keeps_it(tmp_path, postgres):
    opened(tmp_path, catalogue_url="").close()
    with pytest.raises(ConfigError, match=r"has a catalogue of its own.*voices"):
        opened(tmp_path, catalogue_url=postgres.url_of(tmp_path))


def test_a_directory_that_was_moved_is_the_same(voices):
    directory, url = voices
    moved = directory.rename(directory.parent / "moved")
    whole(moved, url)


def test_a_directory_of_which_a_copy_was_restored_can_be_named_again(voices):
    directory, url = voices
    id_ = binding.store_id_of(directory).id
    copy = shutil.copytree(directory, directory.parent / "copy")
    (copy / binding.ID_FILE_NAME).unlink()
    with pytest.raises(ConfigError, match=f"write {id_} into its file"):
        opened(copy, catalogue_url=url)
    (copy / binding.ID_FILE_NAME).write_text(id_)
    whole(copy, url)


def test_a_directory_that_is_not_mounted_for_a_while_costs_no_voice(voices):
    """Its rows were deleted, and then its files removed as nobody's."""
    directory, url = voices
    store, away = opened(directory, catalogue_url=url), directory.parent / "away"
    directory.rename(away)
    directory.mkdir()
    with pytest.raises(StorageError):
        store.recover()
    shutil.copy(away / binding.ID_FILE_NAME, directory)
    with pytest.raises(StorageError, match="is it mounted"):
        store.recover()
    shutil.rmtree(directory)
    away.rename(directory)
    store.close()
    whole(directory, url)
