import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.encoding_samples import is_free, make_key
from vllm_tts_cache.model_executor.encode_work import KeyTurns

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
    with one.turn(make_key(1)):
        for _ in range(2):  # who does not get it does not end it
            assert not is_free(one, make_key(1))
            assert not is_free(other, make_key(1))
        with other.turn(make_key(2)):
            assert not is_free(one, make_key(2))
    with other.turn(make_key(1)):
        assert not is_free(one, make_key(1))


def test_a_turn_ends_with_an_exception(open_turns):
    turns = open_turns()
    with pytest.raises(RuntimeError), turns.turn(make_key()):
        raise RuntimeError
    assert is_free(turns, make_key())


def test_no_key_waits_for_another(open_turns):
    turns = open_turns()
    with ExitStack() as held:
        assert all(held.enter_context(turns.turn(make_key(n))) for n in range(300))


def test_one_of_many_threads_gets_it(open_turns):
    turns = [open_turns() for _ in range(2)]
    with ExitStack() as held, ThreadPoolExecutor(8) as pool:
        enter = held.enter_context
        taken = pool.map(lambda n: enter(turns[n % 2].turn(make_key())), range(40))
        assert sum(taken) == 1


def test_a_turn_ends_with_its_process(open_turns):
    mine, taken = open_turns(), FORK.Event()

    def take_and_wait() -> None:
        with open_turns().turn(make_key()):
            taken.set()
            signal.pause()

    process = FORK.Process(target=take_and_wait)
    process.start()
    assert taken.wait(30)
    assert not is_free(mine, make_key())
    process.kill()
    process.join()
    assert is_free(mine, make_key())


def test_a_child_does_not_hold_what_its_parent_took(open_turns):
    turns, other = open_turns(), open_turns()
    reader, writer = os.pipe()
    with turns.turn(make_key()):
        if (child := os.fork()) == 0:
            os.write(writer, b"?" if is_free(turns, make_key()) else b"x")
            signal.pause()
        assert os.read(reader, 1) == b"x"
        assert not is_free(other, make_key())
    assert is_free(other, make_key())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_where_the_file_cannot_be_locked_each_has_the_turn(tmp_path):
    (tmp_path / "file").write_text("")
    turns = KeyTurns(tmp_path / "file" / "turns.lock")
    with turns.turn(make_key()):
        assert is_free(KeyTurns(tmp_path / "file" / "turns.lock"), make_key())
