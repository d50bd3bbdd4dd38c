"""Several processes share one directory."""

import itertools
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import store_samples
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.errors import SpeakerLimitError, SpeakerNotFoundError, TTSCacheError
from vllm_tts_cache.store.speaker_store import SpeakerStore

pytestmark = pytest.mark.every_backend

NUM_PROCESSES = 8
FORK = multiprocessing.get_context("fork")


def vector(store: SpeakerStore, name: str) -> int:
    return store.registrations.register(
        store_samples.voice(name, None), None
    ).record.generation


def in_processes(work: Callable, *args, num_processes: int = NUM_PROCESSES) -> list:
    """What each process returns or raises; all begin at the same moment."""
    barrier, results = FORK.Barrier(num_processes), FORK.Queue()

    def run(index: int) -> None:
        barrier.wait()
        try:
            results.put(work(index, *args))
        except (OSError, TTSCacheError) as exc:
            results.put(repr(exc))

    processes = [FORK.Process(target=run, args=(n,)) for n in range(num_processes)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return answers


def open_and_register(index: int, directory: Path) -> str:
    store = store_samples.opened(directory)
    secret = store.database.secret()
    vector(store, f"{index}")
    store.close()
    return secret.hex()


def test_processes_open_a_new_directory_at_once(tmp_path, engine):
    for attempt in range(4 if engine == "sqlite" else 2):
        directory = tmp_path / f"new {attempt}"
        answers = in_processes(open_and_register, directory)
        store = store_samples.opened(directory)
        assert answers == [store.database.secret().hex()] * NUM_PROCESSES
        assert store.num_speakers() == NUM_PROCESSES
        assert store.verify() == []
        store.close()


LOOK = """
import sys
from pathlib import Path
from vllm_tts_cache.config import Settings
from vllm_tts_cache.store.opening import open_existing
store = open_existing(Settings(samples_dir=Path(sys.argv[1])))
print(store.num_speakers())
store.close()
"""


def look(directory: Path) -> str:
    command = [sys.executable, "-c", LOOK, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.sqlite
def test_who_only_looks_does_not_take_the_log_from_who_opened_the_file_twice(tmp_path):
    """It did: opening the file again dropped what locks its process had on it, and a
    command beside it took itself for the last who closes it. Disk I/O errors."""
    stores = [store_samples.opened(tmp_path), store_samples.opened(tmp_path)]
    vector(stores[0], "ana")
    log = tmp_path / "catalogue.sqlite3-wal"
    before = log.stat().st_ino
    assert look(tmp_path) == "1\n"
    assert log.stat().st_ino == before
    stores.append(store_samples.opened(tmp_path))
    for number, store in enumerate(stores):
        vector(store, f"voice {number}")
    assert look(tmp_path) == "4\n"
    assert stores[0].verify() == []
    for store in stores:
        store.close()


def register_often(index: int, directory: Path) -> list[int]:
    store = store_samples.opened(directory)
    return [vector(store, "ana") for _ in range(20)]


def test_registering_one_name_at_once_leaves_one_row_and_no_generation_twice(tmp_path):
    answers = in_processes(register_often, tmp_path, num_processes=4)
    assert all(generations == sorted(generations) for generations in answers)
    given = sorted(itertools.chain.from_iterable(answers))
    assert given == list(range(1, 81))
    store = store_samples.opened(tmp_path)
    found = store.find("ana")
    assert found is not None
    assert (store.num_speakers(), found.record.generation) == (1, given[-1])
    store.close()


def register_one(index: int, directory: Path) -> str:
    store = store_samples.opened(directory, max_uploaded=3)
    try:
        vector(store, f"{index}")
    except SpeakerLimitError:
        return "full"
    return "ok"


def test_the_limit_holds_across_processes(tmp_path):
    answers = in_processes(register_one, tmp_path)
    assert sorted(answers) == ["full"] * 5 + ["ok"] * 3


def test_a_reader_sees_the_old_voice_or_the_new_one_but_never_none(tmp_path):
    done = FORK.Event()
    store = store_samples.opened(tmp_path)
    vector(store, "ana")
    store.close()

    def replace() -> None:
        writer = store_samples.opened(tmp_path)
        for _ in range(200):
            vector(writer, "ana")
        done.set()

    process = FORK.Process(target=replace)
    process.start()
    reader = store_samples.opened(tmp_path)
    thread = threading.Thread(target=watch, args=(reader, done, seen := []))
    thread.start()
    watch(reader, done, mine := [])
    thread.join()
    process.join()
    reader.close()
    for generations in (seen, mine):
        assert None not in generations
        assert generations == sorted(generations)
        assert len(set(generations)) > 10


def watch(reader: SpeakerStore, done, generations: list) -> None:
    while not done.is_set():
        found = reader.find("ana")
        generations.append(None if found is None else found.record.generation)


def register_publish_and_delete(index: int, directory: Path) -> str:
    store = store_samples.opened(directory, inline_audio_max_bytes=20_000)
    for n in range(25):
        name, number = f"name {(index + n) % 3}", n % 2
        done = store_samples.register(store, name, number)
        if done.deletion is not None:
            store.remove_files(done.deletion)
        store_samples.publish(store, number)
        if n % 3 == index % 3:
            try:
                store_samples.delete(store, name)
            except SpeakerNotFoundError:
                continue
    return "ok"


def test_processes_that_share_a_clip_lose_and_leave_nothing_of_it(tmp_path):
    answers = in_processes(register_publish_and_delete, tmp_path, num_processes=3)
    assert answers == ["ok"] * 3
    store = store_samples.opened(tmp_path)
    assert store.verify() == []
    for record in store.records(Page(limit=9)):
        assert record.audio_sha256 is not None
        assert store.read_audio(record.audio_sha256) is not None
        store_samples.delete(store, record.name)
    for number in (0, 1):
        assert store_samples.traces(tmp_path, store_samples.address(number)) == []
    assert store.recover() == []
    store.close()
