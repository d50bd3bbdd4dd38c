"""A file system with no space left: voices can be deleted, and a server starts.

A process mounts a small one where only itself sees it, and fills it.
"""

import asyncio
import ctypes
import errno
import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.store_samples import address, clip, delete, opened, register, traces
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.errors import StorageFullError
from vllm_tts_cache.files import BALLAST, BALLAST_BYTES

NUM_BYTES = 24 << 20
NAMES = [f"v{number}" for number in range(5)]
UNSHARED = ("unshare", "--user", "--map-root-user", "--mount")
NEW_USER_AND_MOUNTS = 0x10000000 | 0x00020000
# What the process of the tests has imported takes a server's twenty seconds to import.
FORK = multiprocessing.get_context("fork")


CANNOT = shutil.which("unshare") is None or (
    subprocess.run([*UNSHARED, "true"], check=False).returncode != 0
)


@pytest.mark.sqlite
@pytest.mark.skipif(CANNOT, reason="needs unshare, and user namespaces")
@pytest.mark.parametrize("what", ["deletions", "expiry", "eviction", "server"])
def test_where_no_space_is_left(tmp_path, what):
    process = FORK.Process(target=on_a_small_disk, args=(globals()[what], tmp_path))
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0


def on_a_small_disk(act, directory):
    libc, own = ctypes.CDLL(None, use_errno=True), Path("/proc/self")
    user, group = os.getuid(), os.getgid()
    assert libc.unshare(NEW_USER_AND_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"0 {user} 1")
    (own / "gid_map").write_text(f"0 {group} 1")
    place, size = os.fsencode(directory), f"size={NUM_BYTES}".encode()
    mounted = libc.mount(b"tmpfs", place, b"tmpfs", 0, size)
    assert mounted == 0, os.strerror(ctypes.get_errno())
    act(directory)


def fill(directory):
    """Leave no space on the file system."""
    with (directory / "others").open("ab", buffering=0) as file:
        for num_bytes in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(num_bytes))
            except OSError as exc:
                assert exc.errno == errno.ENOSPC


def ballast_of(store):
    return store.directory / BALLAST


def full(directory, *, has_ended=False):
    """A store of voices, their ballast, and inline audio, on a full file system."""
    store = opened(directory / "voices")
    for number, name in enumerate(NAMES):
        register(store, name, number)
        store.store_inline(clip(50 + number))
    if has_ended:
        with store.database.write() as db:
            db.execute(schema.speaker.update().values(expires_at=5.0))
    store.sweep()
    ballast = ballast_of(store).stat()
    assert ballast.st_size == BALLAST_BYTES <= ballast.st_blocks * 512
    assert ballast.st_mode & 0o777 == 0o600
    assert store.recover() == store.verify() == []
    fill(directory)
    with pytest.raises(StorageFullError):
        register(store, "new", 99)
    assert ballast_of(store).stat().st_size == BALLAST_BYTES
    return store


def end(store, directory):
    """Nothing is wrong with the store, and its ballast comes back with the space."""
    assert store.recover() == store.verify() == []
    fill(directory)
    store.sweep()
    assert ballast_of(store).stat().st_size < BALLAST_BYTES
    (directory / "others").unlink()
    store.sweep()
    assert ballast_of(store).stat().st_size == BALLAST_BYTES
    store.close()


def deletions(directory):
    store = full(directory)
    for number, name in enumerate(NAMES):
        delete(store, name)
        assert traces(store.files.store, address(number)) == []
        # Others take what was freed, what was given up of the ballast included.
        fill(directory)
    end(store, directory)


def expiry(directory):
    store = full(directory, has_ended=True)
    for deletion in store.registrations.delete_expired(100):
        store.remove_files(deletion)
    assert store.num_speakers() == 0
    end(store, directory)


def eviction(directory):
    full(directory).close()
    fill(directory)
    store = opened(directory / "voices", inline_audio_max_bytes=1)
    assert store.writer.trim() == len(NAMES)
    end(store, directory)


def server(directory):
    full(directory).close()
    fill(directory)
    asyncio.run(serve(directory))


async def serve(directory):
    from tests.unit.test_service import Rig

    rig = Rig(directory / "voices")
    for name in NAMES:
        assert rig.store.find(name) is not None
    for name in NAMES[:2]:
        await rig.service.deletions.delete(name, "default")
        fill(directory)
    await rig.close()
