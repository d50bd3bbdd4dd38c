"""``verify`` and ``gc`` on the directory of a stopped server."""

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.in_process_workers import clip, ref_of, store_clip
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli import main
from vllm_tts_cache.store.opening import open_store


@pytest.fixture
def directory(tmp_path, monkeypatch):
    path = tmp_path / "speakers"
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(path))
    with closing(open_store(load_settings())) as store:
        store_clip(store, clip(1), name="kept")
    return path


def gc(capsys, *options, status=0):
    assert main(["gc", "--json", *map(str, options)]) == status
    return json.loads(capsys.readouterr().out)


def test_a_tidy_directory_stays_as_it_is(directory, capsys):
    found = gc(capsys)
    assert found == {
        "directory": str(directory),
        "dry_run": False,
        "expired": [],
        "recovered": [],
        "over_budget_bytes": {},
        "evicted_files": 0,
        "problems": [],
    }
    assert main(["gc"]) == 0
    assert capsys.readouterr().out == f"{directory}: nothing to do\n"


def test_a_voice_whose_end_has_come_is_deleted_with_its_files(directory, capsys):
    with closing(open_store(load_settings())) as store:
        ref = store_clip(store, clip(2), name="over")
    with sqlite3.connect(directory / FILE_NAME) as db:
        past = time.time() - 60
        db.execute("UPDATE speaker SET expires_at = ? WHERE name = 'over'", (past,))
    db.close()
    would = gc(capsys, "--dry-run")
    assert would["expired"] == ["over"]
    assert list(directory.rglob(f"{ref.audio_sha256}*"))
    assert gc(capsys)["expired"] == ["over"]
    with closing(open_store(load_settings())) as store:
        assert store.names(Page(limit=9)) == ["kept"]
    assert not list(directory.rglob(f"{ref.audio_sha256}*"))


def test_inline_audio_over_budget_goes_and_voices_stay(directory, capsys, monkeypatch):
    with closing(open_store(load_settings())) as store:
        for seed in range(3, 6):
            store_clip(store, clip(seed), Segment.INLINE)
        assert store.has_audio(ref_of(clip(3)).audio_sha256)
    monkeypatch.setenv("SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES", "40000")
    would = gc(capsys, "--dry-run")
    assert would["over_budget_bytes"]["inline audio"] > 0
    assert would["evicted_files"] == 0
    found = gc(capsys)
    assert found["evicted_files"] == 2
    assert gc(capsys)["over_budget_bytes"] == {}
    with closing(open_store(load_settings())) as store:
        assert store.has_audio(ref_of(clip(1)).audio_sha256)
        assert store.has_audio(ref_of(clip(5)).audio_sha256)  # the last that was used


def test_what_cannot_be_mended_is_status_1(directory, capsys):
    with closing(open_store(load_settings())) as store:
        path = store.files.file_name(ref_of(clip(1)).audio_sha256, "audio")
    with Path(path).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    found = gc(capsys, status=1)
    assert any("corrupt" in line for line in found["problems"])


def test_a_directory_that_is_in_use_is_left_alone(directory, capsys):
    store = open_store(load_settings())
    store.participants.join()
    assert main(["gc"]) == 2
    assert "is in use" in capsys.readouterr().err
    assert gc(capsys, "--dry-run")["problems"] == []
    store.participants.leave()
    assert main(["gc"]) == 0
    store.close()


def test_a_directory_that_is_not_there_is_not_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path / "none"))
    assert main(["verify"]) == 2
    assert not (tmp_path / "none").exists()
    assert "Set SPEAKER_SAMPLES_DIR" in capsys.readouterr().err


def test_repair_finishes_a_deletion_and_keeps_every_voice(directory, capsys):
    with closing(open_store(load_settings())) as store:
        gone = store_clip(store, clip(2), name="gone").audio_sha256
        store.registrations.delete("gone")
    assert main(["verify"]) == 1 and list(directory.rglob(f"{gone}*"))
    capsys.readouterr()
    assert main(["verify", "--repair"]) == 0
    assert "repaired: " in capsys.readouterr().out
    assert not list(directory.rglob(f"{gone}*"))
    assert list(directory.rglob(f"{ref_of(clip(1)).audio_sha256}/audio*"))
    assert main(["verify"]) == 0
    assert capsys.readouterr().out == f"{directory}: nothing wrong\n"
