import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.encoding_samples import make_key
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.locks import KeyTurns

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def open_turns(tmp_path):
    with ExitStack() as opened:

        def open_() -> KeyTurns:
            turns = KeyTurns(tmp_path / "turns.lock")
            opened.callback(turns.close)
            return turns

        yield open_


def test_one_has_the_turn_of_a_key_and_others_do_not_wait(open_turns):
    one, other = open_turns(), open_turns()
    turn = one.try_take(make_key(1))
    with turn:
        assert one.try_take(make_key(1)) is None
        assert other.try_take(make_key(1)) is None
        with other.try_take(make_key(2)):
            assert one.try_take(make_key(2)) is None
    with other.try_take(make_key(1)):
        assert one.try_take(make_key(1)) is None


def test_a_turn_ends_with_an_exception(open_turns):
    turns = open_turns()
    with pytest.raises(RuntimeError), turns.try_take(make_key()):
        raise RuntimeError
    with turns.try_take(make_key()):
        pass


def test_no_key_waits_for_another(open_turns):
    turns = open_turns()
    with ExitStack() as held:
        for n in range(300):
            held.enter_context(turns.try_take(make_key(n)))


def test_one_of_many_threads_gets_it(open_turns):
    turns = [open_turns() for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda n: turns[n % 2].try_take(make_key()), range(40)))
    assert sum(turn is not None for turn in taken) == 1


def test_a_turn_ends_with_its_process(open_turns):
    mine, taken = open_turns(), FORK.Event()

    def take_and_wait() -> None:
        turn = open_turns().try_take(make_key())
        with turn:
            taken.set()
            signal.pause()

    process = FORK.Process(target=take_and_wait)
    process.start()
    assert taken.wait(30)
    assert mine.try_take(make_key()) is None
    process.kill()
    process.join()
    with mine.try_take(make_key()):
        pass


def test_a_child_does_not_hold_what_its_parent_took(open_turns):
    turns, other = open_turns(), open_turns()
    reader, writer = os.pipe()
    with turns.try_take(make_key()):
        if (child := os.fork()) == 0:
            os.write(writer, b"x" if turns.try_take(make_key()) is None else b"?")
            signal.pause()
        assert os.read(reader, 1) == b"x"
        assert other.try_take(make_key()) is None
    with other.try_take(make_key()):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_lock_file_that_cannot_be_opened_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        KeyTurns(tmp_path / "file" / "turns.lock").try_take(make_key())
