"""A library of voices goes into files and out of them, and is seen to be there."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.encoding_samples import make_encoding
from tests.store_samples import delete, key, long_clip, opened, voice
from vllm_tts_cache.audio.reference import AUDIO
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import SpeakerChanges
from vllm_tts_cache.entrypoints.cli import main
from vllm_tts_cache.entrypoints.cli.voices.bulk import in_parallel
from vllm_tts_cache.entrypoints.cli.voices.bundles import Importing, files_of
from vllm_tts_cache.entrypoints.cli.voices.directory import VoicesDirectory
from vllm_tts_cache.errors import ConfigError, SourceCorruptError

NAMES = ("Ann", "Bea", "Cid", "Dan")
SECRET = "a secret of both servers"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A stopped server's directory with voices, one without, and a folder."""
    monkeypatch.setenv("SPEAKER_BUNDLE_KEY", SECRET)
    old, new, folder = (tmp_path / name for name in ("old", "new", "folder"))
    with closing(opened(old)) as store:
        kept = store.consents.add("Ann's", "de", long_clip(9))
        for number, name in enumerate(NAMES):
            fields = {"labels": {"n": "o"}, "ref_text": name, "file_size": 5}
            if number == 0:
                fields["consent"] = kept.consent_id
            audio = long_clip(number)
            store.registrations.register(voice(name, audio, **fields), audio)
            encoding_key = replace(key(), audio_sha256=audio.audio.audio_sha256)
            assert store.writer.publish(encoding_key, make_encoding(number))
    opened(new).close()
    return old, new, folder


@pytest.fixture
def voices(capsys):
    def call(*arguments):
        status = main(["voices", *map(str, arguments), "--json"])
        printed = capsys.readouterr()
        return status, json.loads(printed.out), printed.err

    return call


def change(directory, name, /, **changes):
    with closing(opened(directory)) as store:
        store.registrations.change(name, SpeakerChanges(changes))


def test_an_export_goes_on_and_replaces_nothing_that_changed(places, voices):
    old, _, folder = places
    out = ["export", "--all", "--out", folder, "--directory", old]
    voices(*out)
    (folder / "Bea.voice").unlink()
    change(old, "Cid", labels={})
    before = (folder / "Cid.voice").read_bytes()
    (folder / "Dan.voice").write_bytes(b"half")
    status, saved, _ = voices(*out)
    assert status == 1
    outcomes = [(each["name"], each["outcome"]) for each in saved["voices"]]
    done = ("unchanged", "exported", "failed", "failed")
    assert outcomes == list(zip(NAMES, done, strict=True))
    assert (folder / "Cid.voice").read_bytes() == before
    status, saved, _ = voices(*out, "--force")
    assert (status, saved["counts"]) == (0, {"exported": 4})


@pytest.mark.parametrize("is_renamed", (True, False))
def test_a_voice_that_was_changed_is_not_imported_again(places, voices, is_renamed):
    old, new, folder = places
    voices("export", "Ann", "--out", folder, "--directory", old)
    voices("import", folder, "--directory", new)
    change(new, "Ann", **{"name": "Eva"} if is_renamed else {"description": "warm"})
    status, done, _ = voices("import", folder, "--directory", new)
    assert (status, done["counts"]) == (1, {"failed": 1})
    what = "name" if is_renamed else "speaker_description"
    assert f"already registered and differs in {what}" in done["files"][0]["error"]


EXPORTING = """
import os, signal, sys
from pathlib import Path
from vllm_tts_cache.entrypoints.cli.voices.bundles import EXPORT_PREFIX, export_folder
with export_folder(Path(sys.argv[1])) as folder:
    (folder / f"{EXPORT_PREFIX}of-Ann").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_what_a_killed_export_left_goes_and_a_living_ones_does_not(places, voices):
    old, _, folder = places
    out = ["export", "--all", "--out", folder, "--directory", old]
    process = subprocess.Popen([sys.executable, "-c", EXPORTING, str(folder)])
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert voices(*out)[1]["counts"] == {"exported": 4}
    assert len(list(folder.glob(".partial-*"))) == 1
    process.kill()
    process.wait()
    assert voices(*out)[1]["counts"] == {"unchanged": 4}
    assert list(folder.glob(".partial-*")) == []


def test_one_that_got_another_name_is_known_again(places, voices):
    old, new, folder = places
    voices("export", "Ann", "--out", folder, "--directory", old)
    with closing(opened(new)) as store:
        store.registrations.register(voice("Ann", long_clip(7)), long_clip(7))
    rename = ["import", folder, "--on-conflict", "rename", "--directory", new]
    for outcome in ("imported", "unchanged"):
        status, done, _ = voices(*rename)
        assert (status, done["counts"]) == (0, {outcome: 1})
        assert done["verified"] == {"voices": 1, "there": 1, "with_their_ids": 1}
    with closing(opened(new)) as store:
        assert store.names(Page(limit=9)) == ["Ann", "Ann (2)"]


def test_with_another_key_all_is_there_under_new_ids(places, voices, monkeypatch):
    old, new, folder = places
    voices("export", "--all", "--out", folder, "--directory", old)
    monkeypatch.setenv("SPEAKER_BUNDLE_KEY", "another secret of servers")
    status, done, _ = voices("import", folder, "--directory", new)
    assert status == 0
    assert done["verified"] == {"voices": 4, "there": 4, "with_their_ids": 0}


def test_a_voice_whose_end_has_come_is_not_missed(places, voices):
    old, new, folder = places
    end = time.time() + 1.5
    change(old, "Ann", expires_at=end)
    voices("export", "--all", "--out", folder, "--directory", old)
    time.sleep(max(0.0, end - time.time()))
    status, done, _ = voices("import", folder, "--directory", new)
    assert (status, done["counts"]) == (0, {"expired": 1, "imported": 3})
    assert done["verified"] == {"voices": 3, "there": 3, "with_their_ids": 3}


class Losing(VoicesDirectory):
    """A library in which voices do not stay as they were imported."""

    def add_bundle(self, bundle, name, on_conflict, key=None):
        answer = super().add_bundle(bundle, name, on_conflict)
        [imported] = answer["imported"]
        if imported["voice"]["name"] == "Bea":
            delete(self.store, "Bea")
        elif imported["voice"]["name"] == "Cid":
            changes = SpeakerChanges({"labels": {}, "language": "de"})
            self.store.registrations.change("Cid", changes)
        elif imported["voice"]["name"] == "Dan":
            sha = imported["voice"]["audio_sha256"]
            path = Path(self.store.files.file_name(sha, AUDIO))
            path.write_bytes(b"what is left of it")
            with pytest.raises(SourceCorruptError):
                self.store.read_audio(sha)
        return answer


def test_what_is_not_there_in_the_end_has_failed_and_is_counted(places, voices):
    old, new, folder = places
    voices("export", "--all", "--out", folder, "--directory", old)
    with closing(opened(new)) as store:
        importing = Importing(Losing(store, SECRET, "default"), None, "fail")
        many = in_parallel(files_of([folder]), importing.add, title="", num_jobs=1)
        assert (many.counts, many.status) == ({"imported": 4}, 0)
        many, found = importing.verified(many, 1)
    assert (many.counts, many.status) == ({"imported": 1, "failed": 3}, 1)
    assert found == {"voices": 4, "there": 1, "with_their_ids": 1}
    errors = [each.error for each in many.outcomes]
    assert errors == [
        None,
        "it was imported, and is not registered",
        "it differs in language, labels",
        "it is registered; its reference audio is lost",
    ]


def test_a_folder_without_voices_is_a_mistake(tmp_path):
    with pytest.raises(ConfigError, match="no file that ends in"):
        files_of([tmp_path])
