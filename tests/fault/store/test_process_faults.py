"""Processes that die or meet in the middle of a write."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.encoding_samples import (
    INLINE,
    REGISTERED,
    ROOMY,
    assert_same,
    make_encoding,
    make_key,
)
from vllm_tts_cache.store.flights import FileFlights
from vllm_tts_cache.store.tiers.disk import DiskTier

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from tests.encoding_samples import *
from vllm_tts_cache.store.flights import FileFlights
from vllm_tts_cache.store.tiers.disk import DiskTier
root = Path(sys.argv[1])
disk = DiskTier(root, ROOMY)
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start(script, root):
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(root)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("moment", ["os.fsync", "Path.replace"])
def test_a_kill_before_the_rename_leaves_nothing_visible(tmp_path, moment):
    script = f"{moment} = die\ndisk.put(make_key(), make_encoding(), REGISTERED)"
    with start(script, tmp_path) as killed:
        assert killed.wait(30) == -signal.SIGKILL
    disk = DiskTier(tmp_path, ROOMY)
    assert disk.get(make_key(), REGISTERED) is None
    assert not disk.contains(make_key())
    assert disk.verify() == [], "it could belong to a writer that is still at it"
    assert len(disk.verify(0)) == 1
    assert disk.remove_partials(0) == 1
    disk.put(make_key(), make_encoding(), REGISTERED)
    assert_same(disk.get(make_key(), REGISTERED), make_encoding())
    assert disk.verify(0) == []


def test_a_kill_after_the_rename_leaves_a_whole_file(tmp_path):
    script = """
import vllm_tts_cache.files
vllm_tts_cache.files.sync_directory = die
disk.put(make_key(), make_encoding(), REGISTERED)
"""
    with start(script, tmp_path) as killed:
        assert killed.wait(30) == -signal.SIGKILL
    disk = DiskTier(tmp_path, ROOMY)
    assert_same(disk.get(make_key(), REGISTERED), make_encoding())
    assert disk.verify(0) == []


def test_two_processes_writing_promoting_and_forgetting_one_key_stay_whole(tmp_path):
    script = """
for n in range(150):
    disk.put(make_key(), make_encoding(), (INLINE, REGISTERED)[n % 2])
    if (got := disk.get(make_key(), (REGISTERED, INLINE)[n % 3 == 0])) is not None:
        assert_same(got, make_encoding())
    if n % 4 == 0:
        disk.demote(make_key().audio_sha256)
    if n % 5 == 0:
        disk.forget(make_key().audio_sha256)
disk.put(make_key(), make_encoding(), REGISTERED)
"""
    writers = [start(script, tmp_path) for _ in range(2)]
    for writer in writers:
        with writer:
            assert writer.wait(60) == 0
    disk = DiskTier(tmp_path, ROOMY)
    assert_same(disk.get(make_key(), INLINE), make_encoding())
    assert disk.verify(0) == []


def test_the_death_of_a_lock_holder_frees_who_waits(tmp_path):
    script = """
with FileFlights(root / "locks").turn(make_key(), 10) as has_turn:
    print(has_turn, flush=True)
    time.sleep(60)
"""
    flights = FileFlights(tmp_path / "locks")

    def wait():
        with flights.turn(make_key(), 30) as has_turn:
            return has_turn

    with start(script, tmp_path) as holder, ThreadPoolExecutor(1) as pool:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        waiter = pool.submit(wait)
        time.sleep(0.2)
        assert not waiter.done()
        holder.kill()
        began = time.monotonic()
        assert waiter.result(30) is True
        assert time.monotonic() - began < 10
    disk = DiskTier(tmp_path, ROOMY)
    disk.put(make_key(), make_encoding(), INLINE)
    assert disk.verify(0) == []
