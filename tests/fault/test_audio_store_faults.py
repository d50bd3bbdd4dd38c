import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.errors import (
    SourceCorruptError,
    StorageError,
    StorageFullError,
)
from vllm_tts_cache.store.audio_store import AudioStore

INLINE, REGISTERED = Segment.INLINE, Segment.REGISTERED


def make_audio(number=1, num_samples=64):
    return ReferenceAudio.of(np.full(num_samples, number / 1000, np.float32), 24_000)


@pytest.fixture
def store(tmp_path):
    store = AudioStore(tmp_path, inline_max_bytes=1 << 20)
    yield store
    assert store.verify() == []


def files(root):
    return [path for path in root.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize("segment", Segment)
def test_no_flipped_byte_is_ever_served(store, tmp_path, segment):
    audio = make_audio()
    path = store.put(audio, segment)
    good = path.read_bytes()
    for offset in range(len(good)):
        bad = bytearray(good)
        bad[offset] ^= 0xFF
        path.write_bytes(bad)
        assert len(store.verify()) == 1
        with pytest.raises(SourceCorruptError):
            store.get(audio.audio_sha256)
        assert files(tmp_path) == [tmp_path / "quarantine" / path.name]
        assert store.get(audio.audio_sha256) is None
    store.put(audio, segment)
    assert store.get(audio.audio_sha256) is not None


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, 300])
def test_truncated_file_is_set_aside_and_the_next_put_heals_it(store, length):
    audio = make_audio()
    os.truncate(store.put(audio, REGISTERED), length)
    with pytest.raises(SourceCorruptError, match=audio.audio_sha256):
        store.get(audio.audio_sha256)
    store.put(audio, REGISTERED)
    assert store.get(audio.audio_sha256) is not None


@pytest.mark.parametrize(
    "tensors, metadata",
    [
        ({"audio": np.zeros(4, np.float64)}, {"sample_rate": "24000"}),
        ({"audio": np.zeros((2, 2), np.float32)}, {"sample_rate": "24000"}),
        ({"sound": np.zeros(4, np.float32)}, {"sample_rate": "24000"}),
        ({"audio": np.zeros(4, np.float32)}, {"sample_rate": "fast"}),
        ({"audio": np.zeros(4, np.float32)}, {"sample_rate": "9" * 40}),
        ({"audio": np.zeros(4, np.float32)}, None),
        ({"audio": np.array([np.nan], np.float32)}, {"sample_rate": "24000"}),
    ],
)
def test_other_safetensors_are_not_served(store, tensors, metadata):
    path = store.put(make_audio(), REGISTERED)
    safetensors.numpy.save_file(tensors, path, metadata=metadata)
    with pytest.raises(SourceCorruptError):
        store.get(make_audio().audio_sha256)


def test_audio_under_another_name_is_not_served(store):
    path = store.put(make_audio(1), REGISTERED)
    other = store.put(make_audio(2), REGISTERED)
    path.replace(other)
    with pytest.raises(SourceCorruptError, match=make_audio(1).audio_sha256):
        store.get(make_audio(2).audio_sha256)


@pytest.mark.parametrize("segment", Segment)
def test_read_error_leaves_the_file_alone(store, segment):
    # A symlink loop: root ignores permission bits, so chmod 000 would not fail here.
    audio = make_audio()
    path = store.put(audio, segment)
    saved = path.rename(path.parents[3] / "saved")
    path.symlink_to(path)
    with pytest.raises(StorageError) as caught:
        store.get(audio.audio_sha256)
    assert not isinstance(caught.value, SourceCorruptError)
    assert path.is_symlink()
    assert len(store.verify()) == 1
    saved.replace(path)
    assert store.get(audio.audio_sha256) is not None


def test_too_many_open_files_is_not_a_missing_file(store):
    audio = make_audio()
    store.put(audio, REGISTERED)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use, hard))
    held = []
    try:
        with pytest.raises(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(StorageError, match="Too many open files"):
            store.get(audio.audio_sha256)
    finally:
        for handle in held:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.get(audio.audio_sha256) is not None


@pytest.mark.parametrize("segment", Segment)
def test_full_disk_changes_nothing(store, tmp_path, monkeypatch, segment):
    def no_space(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    store.put(make_audio(1), segment)
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(StorageFullError):
            store.put(make_audio(2), segment)
    assert files(tmp_path) == before
    assert store.get(make_audio(2).audio_sha256) is None


def test_file_size_limit_of_the_process_changes_nothing(store, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(StorageFullError):
            store.put(make_audio(num_samples=4_000), REGISTERED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == []


def test_full_disk_does_not_lose_what_is_registered_from_inline(store, monkeypatch):
    def no_space(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = store.put(make_audio(), INLINE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", no_space)
        with pytest.raises(StorageFullError):
            store.put(make_audio(), REGISTERED)
    assert path.exists()


def test_kill_between_write_and_rename_leaves_only_a_partial(tmp_path):
    script = f"""
        import os, pathlib, signal
        import numpy as np
        from vllm_tts_cache.audio.reference import ReferenceAudio
        from vllm_tts_cache.catalogue.segment import Segment
        from vllm_tts_cache.store.audio_store import AudioStore
        pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        audio = ReferenceAudio.of(np.full(64, 0.001, np.float32), 24_000)
        AudioStore(pathlib.Path({str(tmp_path)!r}), 1000).put(audio, Segment.INLINE)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == -signal.SIGKILL
    store = AudioStore(tmp_path, inline_max_bytes=1 << 20)
    assert store.get(make_audio().audio_sha256) is None
    assert len(files(tmp_path)) == 1
    assert "killed writer" in store.verify()[0]
    assert store.verify(partials_older_than_seconds=60) == []
    assert store.remove_partials(older_than_seconds=60) == 0
    # A partial is no inline audio: a sweep must not take what is being written.
    assert store.plan_inline_sweep().kept_bytes == 0
    assert store.remove_partials(older_than_seconds=0) == 1
    store.put(make_audio(), INLINE)
    assert store.verify() == []


def test_stray_files_are_reported_and_left(tmp_path):
    store = AudioStore(tmp_path, inline_max_bytes=1 << 20)
    path = store.put(make_audio(), REGISTERED)
    strays = [path.with_suffix(".wav"), path.parent.parent / "notes.txt"]
    strays.append(path.parent.parent / "zz" / path.name)
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(path.read_bytes())
    assert len(store.verify()) == 3
    assert list(store.iter_registered()) == [make_audio().audio_sha256]
    assert all(stray.exists() for stray in strays)


@pytest.mark.parametrize("demote", [False, True], ids=["registered", "demoted"])
def test_reader_finds_audio_while_it_moves_to_the_other_segment(store, demote):
    audios = [make_audio(number) for number in range(1, 41)]
    for audio in audios:
        store.put(audio, REGISTERED if demote else INLINE)
    current, moved_all, misses = [audios[0]], threading.Event(), []

    def read():
        while not moved_all.is_set():
            if store.get((audio := current[0]).audio_sha256) is None:
                misses.append(audio)

    reader = threading.Thread(target=read)
    reader.start()
    for audio in audios:
        current[0] = audio
        time.sleep(0.005)
        store.demote(audio.audio_sha256) if demote else store.put(audio, REGISTERED)
    moved_all.set()
    reader.join()
    assert misses == []


def test_writers_of_one_audio_in_many_processes_leave_one_file(tmp_path):
    script = f"""
        import pathlib
        import numpy as np
        from vllm_tts_cache.audio.reference import ReferenceAudio
        from vllm_tts_cache.catalogue.segment import Segment
        from vllm_tts_cache.store.audio_store import AudioStore
        store = AudioStore(pathlib.Path({str(tmp_path)!r}), 1 << 20)
        for number in range(1, 40):
            samples = np.full(64, number / 1000, np.float32)
            audio = ReferenceAudio.of(samples, 24_000)
            store.put(audio, Segment.REGISTERED)
            assert store.get(audio.audio_sha256) is not None
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    writers = [subprocess.Popen(command) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    store = AudioStore(tmp_path, inline_max_bytes=1 << 20)
    assert store.verify() == []
    assert len(files(tmp_path)) == 39


def test_nothing_here_loads_torch():
    code = (
        "import sys, vllm_tts_cache.audio.decode, vllm_tts_cache.store.audio_store;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
