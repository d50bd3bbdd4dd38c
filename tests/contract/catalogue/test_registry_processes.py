"""Several processes share one registry."""

import itertools
import multiprocessing
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.registry import Registry
from vllm_tts_cache.errors import SpeakerLimitError, TTSCacheError

NUM_PROCESSES = 8
FORK = multiprocessing.get_context("fork")


def open_registry(path: Path, max_speakers: int = 0) -> Registry:
    return Registry(path, max_speakers=max_speakers, policy="overwrite")


def register(registry: Registry, name: str) -> int:
    new = NewSpeaker(
        name=name, consent="", audio_sha256="a", num_samples=1, sample_rate_hz=1
    )
    return registry.register(new).record.generation


def in_processes(work: Callable, *args, num_processes: int = NUM_PROCESSES) -> list:
    """What each process returns or raises; all begin at the same moment."""
    barrier, results = FORK.Barrier(num_processes), FORK.Queue()

    def run(index: int) -> None:
        barrier.wait()
        try:
            results.put(work(index, *args))
        except (OSError, TTSCacheError, sqlite3.Error) as exc:
            results.put(exc)

    processes = [FORK.Process(target=run, args=(n,)) for n in range(num_processes)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    return answers


def open_and_register(index: int, path: Path) -> str:
    with open_registry(path) as registry:
        register(registry, f"{index}")
        return "ok"


@pytest.mark.parametrize("attempt", range(20))
def test_processes_open_a_new_registry_at_once(tmp_path, attempt):
    path = tmp_path / "new" / "voices.sqlite3"
    assert in_processes(open_and_register, path) == ["ok"] * NUM_PROCESSES
    with open_registry(path) as registry:
        assert registry.count() == NUM_PROCESSES
        assert registry.verify() == []


def register_often(index: int, path: Path) -> list[int]:
    with open_registry(path) as registry:
        return [register(registry, "ana") for _ in range(20)]


def test_registering_one_name_at_once_leaves_one_row_and_no_generation_twice(tmp_path):
    path = tmp_path / "voices.sqlite3"
    answers = in_processes(register_often, path, num_processes=4)
    assert all(generations == sorted(generations) for generations in answers)
    given = sorted(itertools.chain.from_iterable(answers))
    assert given == list(range(1, 81))
    with open_registry(path) as registry:
        record = registry.get("ana")
        assert record is not None
        assert (registry.count(), record.generation) == (1, given[-1])
        assert registry.verify() == []


def register_one(index: int, path: Path) -> str:
    with open_registry(path, max_speakers=3) as registry:
        try:
            register(registry, f"{index}")
        except SpeakerLimitError:
            return "full"
        return "ok"


def test_the_limit_holds_across_processes(tmp_path):
    answers = in_processes(register_one, tmp_path / "voices.sqlite3")
    assert sorted(answers) == ["full"] * 5 + ["ok"] * 3


def test_a_reader_sees_the_old_row_or_the_new_one_but_never_none(tmp_path):
    path, done = tmp_path / "voices.sqlite3", FORK.Event()
    with open_registry(path) as registry:
        register(registry, "ana")

    def replace() -> None:
        with open_registry(path) as writer:
            for _ in range(200):
                register(writer, "ana")
        done.set()

    process = FORK.Process(target=replace)
    process.start()
    with open_registry(path) as reader:
        threads = [threading.Thread(target=watch, args=(reader, done, seen := []))]
        threads[0].start()
        watch(reader, done, mine := [])
        threads[0].join()
    process.join()
    for generations in (seen, mine):
        assert None not in generations
        assert generations == sorted(generations)
        assert len(set(generations)) > 10


def watch(reader: Registry, done, generations: list) -> None:
    while not done.is_set():
        record = reader.get("ana")
        generations.append(None if record is None else record.generation)
