import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from tests.catalogues import engine  # noqa: F401  a fixture of all that follow
from tests.in_process_workers import (
    WAIT_SECONDS,
    SpectrumEncoder,
    clip,
    looked,
    prepare,
    ref_of,
    store_clip,
    wait_until_idle,
    want_call,
    wanted,
    worker_speakers,
)
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.errors import EncodeError, StorageError
from vllm_tts_cache.model_executor.speakers import MAX_FAILED_PROMPTS
from vllm_tts_cache.speaker.wire import EncodingCall, JobState, WantCall
from vllm_tts_cache.store.encoding import EncodingKey

NAMES = ("speaker", "codec")
READY, FAILED, NO_ENCODER = JobState.READY, JobState.FAILED, JobState.NO_ENCODER
MISSING = None


def both(state):
    return dict.fromkeys(NAMES, state)


@pytest.fixture
def encoders():
    return [SpectrumEncoder(name) for name in NAMES]


@pytest.fixture
def speakers(tmp_path, encoders):
    speakers = worker_speakers(tmp_path, encoders)
    yield speakers
    for encoder in encoders:
        encoder.gate.set()
    speakers.close()


@pytest.fixture
def restarted(tmp_path):
    """Another worker on the same storage: nothing in memory, nothing counted."""
    speakers = worker_speakers(tmp_path, [SpectrumEncoder(name) for name in NAMES])
    yield speakers
    speakers.close()


@pytest.fixture
def ref(store):
    return store_clip(store, clip())


def look(speakers, ref, names=NAMES):
    return looked(speakers, ref, names)


def spectra(speakers, ref):
    found = speakers.prompt(ref, NAMES)
    return {name: encoding["spectrum"] for name, encoding in found.items()}


def num_encodes(speakers):
    return sum(speakers.stats().encodes.values())


def hold(speakers, encoder, ref):
    """Have the encode thread in the middle of one encode."""
    encoder.gate.clear()
    wanted(speakers, ref, [encoder.name])
    assert encoder.entered.wait(WAIT_SECONDS)


# -------- wanting


def test_what_another_worker_has_in_its_turn_waits_until_that_is_stuck(
    speakers, restarted, ref
):
    job = speakers._work.job_of(want_call(speakers, ref, ["codec"]).new[0])
    with restarted._work.turns.turn(job.key) as is_mine:
        assert is_mine
        assert not speakers._work.do(job, is_stuck=False)
        assert num_encodes(speakers) == 0
        assert speakers._work.do(job, is_stuck=True) and num_encodes(speakers) == 1


def test_rank_0_encodes_and_the_others_find_what_it_published(speakers, restarted, ref):
    prepare(restarted, ref, NAMES, rank=1)
    assert num_encodes(restarted) == 0
    prepare(speakers, ref, NAMES)
    assert num_encodes(restarted) == 0
    assert spectra(restarted, ref).keys() == set(NAMES)


@pytest.mark.parametrize(
    ("want", "state", "reason"),
    [
        ({"fingerprint": "f" * 64}, NO_ENCODER, ""),
        ({"audio_sha256": "../../etc/passwd"}, FAILED, "not a content address"),
        ({"segment": "somebody's"}, FAILED, "somebody's"),
    ],
)
def test_a_want_that_means_nothing_fails_alone(speakers, ref, want, state, reason):
    call = want_call(speakers, ref, NAMES)
    bad = structs.replace(call.new[0], **want)
    call = structs.replace(call, new=[bad, call.new[1]])
    (report,) = (r for r in speakers.queue.want(call, 0).reports if r.id == bad.id)
    assert report.state is state
    assert reason in report.reason
    wait_until_idle(speakers)
    assert look(speakers, ref)["codec"] is READY


# -------- a disk that fails costs time only


def test_what_a_disk_lost_is_written_again(speakers, restarted, store, tmp_path, ref):
    prepare(speakers, ref, NAMES)
    for path in (tmp_path / "store").rglob("*.safetensors"):
        if path.stem != "audio":
            path.unlink()
    assert look(speakers, ref) == both(READY)
    assert prepare(speakers, ref, NAMES, urgent=True) == both(JobState.READY)
    assert num_encodes(speakers) == 2
    assert spectra(restarted, ref).keys() == set(NAMES)
    assert store.verify() == []


def test_an_encoding_that_nothing_keeps_is_a_failure(tmp_path, encoders, ref):
    speakers = worker_speakers(tmp_path, encoders, memory_max_bytes=1)
    shutil.rmtree(tmp_path / "partial", ignore_errors=True)
    (tmp_path / "partial").write_text("a file where the directory should be")
    prepare(speakers, ref, ["codec"])
    (report,) = speakers.queue.want(WantCall("a test", [], [], 1.0), 0).reports
    assert report.state is FAILED
    assert "neither in memory nor on the disk" in report.reason
    assert num_encodes(speakers) == 1
    speakers.close()


# -------- the encoders


def test_encoders_loaded_again_take_over_what_waits(speakers, encoders, store, ref):
    prepare(speakers, ref, NAMES)
    first, second = (store_clip(store, clip(number)) for number in (1, 2))
    encoders[0].entered.clear()
    hold(speakers, encoders[0], first)
    wanted(speakers, second, ["speaker"])
    anew = {name: SpectrumEncoder(name) for name in NAMES}
    threading.Timer(0.05, encoders[0].gate.set).start()
    speakers.fingerprints = speakers.load_encoders(lambda: anew)
    wait_until_idle(speakers)
    assert [encoders[0].num_calls, anew["speaker"].num_calls] == [2, 1]
    assert encoders[0].thread is anew["speaker"].thread
    assert look(speakers, first)["speaker"] is READY
    assert look(speakers, second)["speaker"] is READY
    assert spectra(speakers, ref).keys() == set(NAMES)
    assert num_encodes(speakers) == 4


def test_no_other_encoder_ever_fills_a_key(speakers, encoders, store, ref):
    """A job may wait while another checkpoint is loaded in the place of its own."""
    hold(speakers, encoders[0], ref)
    waiting = store_clip(store, clip(1))
    wanted(speakers, waiting, ["codec"])
    sha, fingerprint = waiting.audio_sha256, speakers.fingerprints["codec"]
    old = EncodingKey(audio_sha256=sha, encoder_fingerprint=fingerprint)
    other = SpectrumEncoder("codec")
    other.fingerprint = "f" * 64
    threading.Timer(0.05, encoders[0].gate.set).start()
    speakers.fingerprints = speakers.load_encoders(lambda: {"codec": other})
    wait_until_idle(speakers)
    assert other.num_calls == 0
    assert not store.read_here(old)
    assert store.failures(waiting.audio_sha256) == {}
    prepare(speakers, waiting, ["codec"])
    assert look(speakers, waiting, names=["codec"]) == {"codec": READY}


# -------- prompts


def test_a_missing_prompt_fails_at_once_amid_an_encode(speakers, encoders, store, ref):
    hold(speakers, encoders[0], ref)
    other = store_clip(store, clip(1))
    with pytest.raises(EncodeError, match="its speaker and codec encoding is not"):
        speakers.prompt(other, NAMES)
    assert not encoders[0].gate.is_set()
    assert speakers.stats().in_flight == 1, "a prompt queues nothing"


def test_all_ranks_fail_a_prompt_that_one_misses(tmp_path, encoders, ref, monkeypatch):
    asked = []

    def another_misses_it(is_here):
        asked.append(is_here)
        return False

    ranks: Any = SimpleNamespace(all_agree=another_misses_it, is_first=True)
    speakers = worker_speakers(tmp_path, encoders, ranks=ranks)
    prepare(speakers, ref, NAMES)
    with pytest.raises(EncodeError, match="another rank"):
        speakers.prompt(ref, NAMES)
    with pytest.raises(EncodeError, match="not stored"):
        speakers.prompt(ref_of(clip(1)), NAMES)
    assert asked == [True, False], "each rank asks once a prompt, whatever it has"
    monkeypatch.setattr(speakers._cache, "get", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        speakers.prompt(ref, NAMES)
    assert asked == [True, False, False], "and whatever happens to it"
    speakers.close()


def test_failed_prompts_are_remembered_up_to_a_number_and_a_length(speakers):
    for number in range(MAX_FAILED_PROMPTS + 1):
        speakers.remember_failed_prompt(str(number), "x" * 10_000)
    assert speakers.failed(["0"]) == {}
    assert len(speakers.failed(["1"])["1"]) <= 500


def test_deleting_all_leaves_and_names_what_is_in_hand(speakers, encoders, store, ref):
    other, third = (store_clip(store, clip(number)) for number in (1, 2))
    prepare(speakers, ref, NAMES)
    prepare(speakers, other, NAMES)
    encoders[0].entered.clear()
    hold(speakers, encoders[0], third)
    wanted(speakers, ref_of(clip(3)), ["codec"])
    assert speakers.stats().in_flight == 2
    told = speakers.delete_all()
    assert (told.num_entries, told.busy) == (4, [third.audio_sha256])
    assert speakers.stats().in_flight == 1
    assert speakers.stats().tiers["memory"].entries == 0
    encoders[0].gate.set()
    wait_until_idle(speakers)
    assert speakers.delete_all().busy == []
    speakers.prompt(ref, NAMES)  # from its files
    assert speakers.stats().tiers["memory"].entries == 2


def test_a_voice_used_from_memory_leaves_a_full_disk_late(tmp_path, speakers, store):
    hot, idle, new = (store_clip(store, clip(number)) for number in range(3))
    prepare(speakers, hot, ["codec"])
    prepare(speakers, idle, ["codec"])
    speakers.prompt(hot, ["codec"])
    speakers.close()  # hands on what was noted, as it does now and then
    fingerprint = speakers.fingerprints["codec"]
    size = len(speakers.encoding(EncodingCall(hot.audio_sha256, fingerprint)).encoding)
    full = worker_speakers(
        tmp_path, [SpectrumEncoder("codec")], disk_max_bytes=2 * size, inline_share=0.0
    )
    prepare(full, new, ["codec"])
    stored = [look(full, ref, names=["codec"])["codec"] for ref in (hot, idle, new)]
    full.close()
    assert stored == [READY, MISSING, READY]


@contextmanager
def the_engines_thread():
    """Be it: has what was done on it that it may not do."""
    done, thread = [], threading.get_ident()

    def refuse(owner, name):
        real = getattr(owner, name)

        def called(*args, **kwargs):
            if threading.get_ident() == thread:
                done.append(name)
                raise StorageError("refused")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("_lent", "first_at_once"):
            refuse(Database, name)
        reads, writes = ("listdir", "scandir"), ("unlink", "rmdir", "fsync")
        for name in (*reads, *writes, "replace", "rename"):
            refuse(os, name)
        yield done


def deleted(speakers, ref):
    """Delete an audio, and ask again for as long as it is busy; how often it was."""
    until, num_busy = time.monotonic() + WAIT_SECONDS, 0
    while busy := speakers.delete([ref.audio_sha256]).busy:
        assert busy == [ref.audio_sha256]
        assert time.monotonic() < until
        num_busy += 1
        time.sleep(0.01)
    return num_busy


@pytest.mark.parametrize("engine", ("sqlite", "bucket"), indirect=True)
def test_the_engines_thread_asks_the_catalogue_for_nothing(
    engine,  # noqa: F811
    speakers,
    store,
    ref,
):
    """An RPC and a prefill hold up every stream: no SQL, no write, no scan."""
    prepare(speakers, ref, NAMES)
    with the_engines_thread() as done:
        spectra(speakers, ref)
        look(speakers, ref)
        wanted(speakers, ref_of(clip(1)), NAMES)
        codec = speakers.fingerprints["codec"]
        speakers.encoding(EncodingCall(ref.audio_sha256, codec))
        speakers.stats()
        speakers.failed(["x"])
        if engine == "bucket":
            assert deleted(speakers, ref) > 0
        else:
            assert speakers.delete([ref.audio_sha256]).busy == []
            assert spectra(speakers, ref).keys() == set(NAMES), "from the files"
    assert done == []
    copies = store.files.audio_directory(ref.audio_sha256)
    assert copies.exists() == (engine == "sqlite")


@pytest.mark.parametrize("engine", ("bucket",), indirect=True)
def test_a_deletion_is_busy_for_as_long_as_the_disk_keeps_copies(
    speakers, store, ref, monkeypatch, plugin_log
):
    prepare(speakers, ref, NAMES)
    copies = store.files.audio_directory(ref.audio_sha256)

    def broken(*_args, **_kwargs):
        raise OSError(errno.EIO, "the disk")

    with monkeypatch.context() as sabotage:
        sabotage.setattr(os, "unlink", broken)
        for _ in range(3):
            assert speakers.delete([ref.audio_sha256]).busy == [ref.audio_sha256]
            time.sleep(0.05)
    assert copies.exists()
    assert "still on this machine's disk" in plugin_log.text
    deleted(speakers, ref)
    assert not copies.exists()


def test_the_engines_thread_waits_for_no_write(speakers, store, ref, monkeypatch):
    """A fence was held over the fsync: an RPC waited for the disk."""
    other = store_clip(store, clip(1))
    prepare(speakers, other, NAMES)
    fsync, writing, gate = os.fsync, threading.Event(), threading.Event()

    def slow(handle):
        writing.set()
        assert gate.wait(WAIT_SECONDS)
        fsync(handle)

    def ask():
        spectra(speakers, other)
        look(speakers, ref)
        wanted(speakers, ref, NAMES)
        speakers.stats()
        codec = speakers.fingerprints["codec"]
        speakers.encoding(EncodingCall(other.audio_sha256, codec))
        return speakers.delete([ref.audio_sha256]).busy

    monkeypatch.setattr(os, "fsync", slow)
    wanted(speakers, ref, NAMES)
    assert writing.wait(WAIT_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        try:
            assert answer.result(WAIT_SECONDS / 3) == [ref.audio_sha256]
        finally:
            gate.set()
