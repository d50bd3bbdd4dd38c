"""Voices go from one store to another in a file, whole or not at all."""

import io
import os
import struct
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from tests.audio_clips import sndfile_bytes, voiced
from tests.encoding_samples import assert_same, make_encoding
from tests.store_samples import (
    clip,
    delete,
    key,
    long_clip,
    opened,
    register_vector,
    voice,
)
from vllm_tts_cache.audio.decode import decode_clips, join
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.errors import (
    InvalidBundleError,
    SpeakerExistsError,
    SpeakerRequestError,
)
from vllm_tts_cache.store import bundle_format, encoding
from vllm_tts_cache.store.bundles import KEY_FILE, Bundles
from vllm_tts_cache.tenants import Tenant

SECRET = "a secret of both servers"


def register(store, name, number=0, **fields):
    audio = long_clip(number)
    return store.registrations.register(voice(name, audio, **fields), audio)


@pytest.fixture
def other(tmp_path):
    store = opened(tmp_path / "other")
    yield store
    assert store.verify() == []
    store.close()


@pytest.fixture
def exported(store):
    """A voice with all that one can have, and its bundle."""
    consent = store.consents.add("Ann's", "de", long_clip(9))
    fields = {
        "consent": consent.consent_id,
        "ref_text": "wörter",
        "description": "warm",
        "language": "de",
        "labels": {"team": "news"},
    }
    record = register(store, "Ann", 0, **fields).record
    encoding_key = replace(key(0), audio_sha256=record.audio_sha256)
    assert store.writer.publish(encoding_key, make_encoding(0))
    return record, encoding_key, Bundles(store, SECRET).export("ann")[1]


def told_as_ids_and_dates(store, record):
    """What clients know a voice and its recording by."""
    voice = record.speaker_id, record.created_at, record.updated_at
    recording = store.consents.get(record.consent_id, record.tenant)
    return voice, (recording.consent_id, recording.created_at)


def test_of_an_unsigned_bundle_ids_dates_and_encodings_are_new(exported, store, other):
    """Nobody but who has the key can have encodings taken, for any voice."""
    record, encoding_key, data = exported
    found = entries(data)
    told = msgspec.json.decode(found["voice.json"]) | {"created_at": 5.0}
    forged = packed(found | {"voice.json": msgspec.json.encode(told)})
    for bundle, secret in ((data, ""), (forged, SECRET)):
        bundles = Bundles(other, secret)
        imported = bundles.import_voice(bundle, on_conflict="rename")
        assert (imported.num_kept, imported.num_left) == (0, 1)
        assert other.read(encoding_key) is None
        after = imported.done.record
        new = told_as_ids_and_dates(other, after)
        old = told_as_ids_and_dates(store, record)
        assert all(mine[0] != theirs[0] for mine, theirs in zip(new, old, strict=True))
        assert after.created_at > record.created_at


@pytest.mark.every_backend
def test_voices_with_one_recording_that_come_at_once_share_it(exported, other):
    record, _, data = exported
    bundles, start = Bundles(other, SECRET), threading.Barrier(4)

    def bring(number):
        start.wait(10)
        return bundles.import_voice(data, name=f"copy {number}").done.record

    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(bring, range(4)))
    assert [each.consent_id for each in copies] == [record.consent_id] * 4
    for copy in copies:
        delete(other, copy.name)
    other.remove_files(other.consents.delete(record.consent_id))


def test_an_id_is_of_one_voice_whoever_brings_it_again(exported, other):
    """Neither a copy nor another tenant gets an id that is in use."""
    record, _, data = exported
    bundles = Bundles(other, SECRET)
    first = bundles.import_voice(data).done.record
    copy = bundles.import_voice(data, name="Bea").done.record
    theirs = bundles.import_voice(data, tenant=Tenant(name="acme")).done.record
    assert first.speaker_id == record.speaker_id
    assert len({each.speaker_id for each in (first, copy, theirs)}) == 3
    assert theirs.consent_id != first.consent_id == record.consent_id
    assert other.find(record.speaker_id, "acme") is None
    replaced = bundles.import_voice(data, on_conflict="replace").done.record
    assert replaced.speaker_id == record.speaker_id
    assert replaced.created_at > first.created_at


def test_a_deleted_voice_is_brought_back_with_its_id(exported, store):
    record, _, data = exported
    store.remove_files(store.registrations.delete("Ann"))
    assert store.find(record.speaker_id) is None
    back = Bundles(store, SECRET).import_voice(data).done.record
    assert back.speaker_id == record.speaker_id
    assert store.find(record.speaker_id).record == back
    again = store.registrations.delete(record.speaker_id)
    store.remove_files(again)
    assert again.public_id == record.speaker_id


@pytest.mark.every_backend
def test_an_import_is_done_once_by_its_key(exported, store):
    _, _, data = exported
    bundles = Bundles(store, SECRET)
    how: dict[str, Any] = {"on_conflict": "rename", "key": "key"}
    first, again = (bundles.import_voice(data, **how) for _ in range(2))
    assert again == first and first.done.record.name == "Ann (2)"
    bundles.import_voice(data, on_conflict="rename")
    assert store.names(Page(limit=9)) == ["Ann", "Ann (2)", "Ann (3)"]
    with pytest.raises(SpeakerRequestError, match="Idempotency-Key"):
        bundles.import_voice(data, on_conflict="replace", key="key")


def entries(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def test_a_server_takes_back_what_it_gave(exported, store):
    data = Bundles(store, "").export(exported[0].speaker_id)[1]
    deletion = store.registrations.delete("Ann")
    store.remove_files(deletion)
    imported = Bundles(store, "").import_voice(data)
    assert imported.num_kept == 1
    assert (store.directory / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_an_encoding_that_is_there_stays(exported, store):
    record, encoding_key, data = exported
    assert store.writer.publish(encoding_key, make_encoding(5))
    imported = Bundles(store, SECRET).import_voice(data, on_conflict="replace")
    assert imported.num_kept == 1
    assert_same(store.read(encoding_key), make_encoding(5))
    assert imported.done.record.speaker_id == record.speaker_id


@pytest.mark.sqlite
def test_an_import_that_is_killed_leaves_no_recording(exported, tmp_path):
    """It was kept before its voice, in a transaction of its own."""
    if (child := os.fork()) == 0:
        importing = opened(tmp_path / "killed")

        def die(db, cursor, statement, *_):
            if "INTO speaker " in statement:
                os._exit(9)

        event.listen(importing.database.backend.reading, "before_cursor_execute", die)
        Bundles(importing, SECRET).import_voice(exported[2])
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    store = opened(tmp_path / "killed")
    assert store.consents.on_page(9) == []
    store.recover()
    assert store.verify() == []
    done = Bundles(store, SECRET).import_voice(exported[2]).done
    [kept] = store.consents.on_page(9)
    assert kept.consent_id == done.record.consent_id
    store.close()


def test_what_cannot_be_registered_leaves_no_recording(exported, other):
    register(other, "Ann", 3)
    with pytest.raises(SpeakerExistsError):
        Bundles(other, SECRET).import_voice(exported[2])
    assert other.consents.on_page(9) == []


@pytest.mark.parametrize(
    "embedding", (b"", b"abc", bytes(4 * 5000), struct.pack("<f", float("nan")))
)
def test_an_embedding_that_cannot_be_is_refused(store, other, embedding):
    register_vector(store, "Ann")
    found = entries(Bundles(store, SECRET).export("Ann")[1])
    told = msgspec.json.decode(found["voice.json"], type=bundle_format.BundledVoice)
    files = {bundle_format.EMBEDDING: embedding}
    data = bundle_format.write(told, files, SECRET.encode())
    with pytest.raises(SpeakerRequestError):
        Bundles(other, SECRET).import_voice(data)
    assert other.num_speakers() == 0


def packed(found, compression=zipfile.ZIP_STORED):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as archive:
        for name, data in found.items():
            archive.writestr(name, data)
    return written.getvalue()


def retold(found, **changed):
    """Signed anew by somebody who has the key: what is left is what is checked."""
    told = msgspec.json.decode(found["voice.json"]) | changed
    data = msgspec.json.encode(told)
    signed = bundle_format._signature(SECRET.encode(), data)
    return found | {"voice.json": data, "signature": signed}


def unsigned(found, **changed):
    return found | {"voice.json": retold(found, **changed)["voice.json"]}


def told_elsewhere(archive):
    """The same, its list described by the record that archives above 4 GiB have."""
    body, end = archive[:-22], archive[-22:]
    _, num_entries, num_bytes, offset, _ = bundle_format._END.unpack(end)
    counts = num_entries, num_entries, num_bytes, offset
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, *counts)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(body), 1)
    return body + record + locator + end


HOSTILE = {
    "nothing": lambda found: b"",
    "no archive": lambda found: b"PK" + bytes(1000),
    "no entries": lambda found: packed({}),
    "no audio": lambda found: packed(
        {k: v for k, v in found.items() if "audio" not in k}
    ),
    "compressed": lambda found: packed(found, zipfile.ZIP_DEFLATED),
    "a bomb": lambda found: packed({"voice.json": bytes(10**8)}, zipfile.ZIP_DEFLATED),
    "too much": lambda found: bytes(bundle_format.MAX_BYTES + 1),
    "a long list": lambda found: packed(
        {f"{n}": b"" for n in range(2000)} | {"voice.json": b"{}"}
    ),
    "a list that is told elsewhere": lambda found: told_elsewhere(packed(found)),
    "a comment": lambda found: packed(found)[:-2] + b"\x05\x00words",
    "a short entry": lambda found: packed(found)[:-30],
    "another sum": lambda found: packed(
        found | {"audio.wav": found["audio.wav"] + b"x"}
    ),
    "another address": lambda found: packed(unsigned(found, audio_sha256="0" * 64)),
}
ADDED = {
    "a path": {"../../etc/passwd": b"x"},
    "an absolute path": {"/etc/passwd": b"x"},
    "an embedding as well": {"embedding.f32": struct.pack("<f", 0.5)},
    "another entry": {"readme.txt": b"x"},
    "many entries": {f"encodings/{n:064x}.safetensors": b"" for n in range(100)},
    "no version": {"voice.json": b"{}"},
    "deep JSON": {"voice.json": b"[" * 100_000},
}
# What is told of the voice, and signed by somebody who has the key.
RETOLD: dict[str, dict[str, Any]] = {
    "another version": {"format": 3},
    "clips that are none": {"format": 2},
    "cuts of the older version": {"clip_starts": [0, 24_000]},
    "cuts of one clip": {"format": 2, "clip_starts": [0, 24_000]},
    "unknown fields": {"surprise": 1},
    "no address": {"audio_sha256": None},
    "no name": {"name": ""},
    "a name of an id": {"name": "voice_" + "0" * 32},
    "labels": {"labels": {"": ""}},
    "long text": {"ref_text": "x" * 3000},
    "a long field": {100_000 * "/a": 1},
    "past": {"expires_at": 5.0},
    "an id that is none": {"id": "voice_1"},
    "a recording's id": {"id": "cons_" + "0" * 32},
    "a negative size": {"file_size": -1},
}


@pytest.mark.sqlite
@pytest.mark.parametrize("what", [*HOSTILE, *ADDED, *RETOLD])
def test_a_hostile_bundle_is_refused_whole(exported, other, what):
    found = entries(exported[2])
    if make := HOSTILE.get(what):
        data = make(found)
    elif added := ADDED.get(what):
        data = packed(found | added)
    else:
        data = packed(retold(found, **RETOLD[what]))
    with pytest.raises(SpeakerRequestError) as caught:
        Bundles(other, SECRET).import_voice(data)
    assert len(str(caught.value)) < 1_000
    assert what != "another version" or "export it again" in str(caught.value)
    assert other.num_speakers() == 0 and other.consents.on_page(9) == []
    assert other.read_audio(exported[0].audio_sha256) is None


@pytest.fixture
def of_two_clips(store):
    audio = join([clip(0, 30_000), clip(1, 40_000)])
    fields = {"clip_starts": (0, 30_000), "ref_text": "one\ntwo"}
    record = store.registrations.register(voice("Ann", audio, **fields), audio).record
    encoding_key = replace(key(0), audio_sha256=record.audio_sha256)
    assert store.writer.publish(encoding_key, make_encoding(0))
    return record, encoding_key, Bundles(store, SECRET).export("Ann")[1]


LOSSY = {"mp3": ("MP3", "MPEG_LAYER_III"), "ogg": ("OGG", "VORBIS")}


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", LOSSY)
def test_lossy_clips_stay_as_they_came_to_the_bit(store, open_here, other, kind):
    made = (voiced(24_000, hz / 100, pitch_hz=hz) for hz in (200, 300))
    files = [sndfile_bytes(samples, 24_000, *LOSSY[kind]) for samples in made]
    decoded = decode_clips(files)
    audio, sha = decoded.audio, decoded.audio.audio_sha256
    fields = {"clip_starts": audio.clip_starts, "ref_text": "one\ntwo"}
    store.registrations.register(voice("Ann", decoded, **fields), decoded)
    num_bytes = Path(store.files.file_name(sha, "audio")).stat().st_size
    assert num_bytes < 1.05 * sum(map(len, files)) + 512 < audio.samples.nbytes / 4
    restarted = open_here()
    Bundles(other, "").import_voice(Bundles(restarted, "").export("Ann")[1])
    for each in (restarted, other):
        found = each.read_audio(sha)
        assert found.samples.tobytes() == audio.samples.tobytes()
        assert found.clip_starts == audio.clip_starts


@pytest.mark.every_backend
@pytest.mark.parametrize("num_clips", [1, 2])
def test_what_decodes_otherwise_keeps_its_address(store, other, monkeypatch, num_clips):
    """No server took its bundle, not even the one that had made it."""
    clips = (voiced(24_000, 3, pitch_hz=hz) for hz in (200, 300)[:num_clips])
    files = [sndfile_bytes(samples, 24_000, *LOSSY["ogg"]) for samples in clips]
    decoded = decode_clips(files)
    sha = decoded.audio.audio_sha256
    fields = {}
    if num_clips > 1:
        fields = {"clip_starts": decoded.audio.clip_starts, "ref_text": "one\ntwo"}
    store.registrations.register(voice("Ann", decoded, **fields), decoded)
    its_key = replace(key(0), audio_sha256=sha)
    assert store.writer.publish(its_key, make_encoding(0))
    decode_file = encoding._decoded

    def other_version(data, starts):
        audio = decode_file(data, starts)
        samples = audio.samples * np.float32(0.999)
        return ReferenceAudio.of(samples, audio.sample_rate_hz, starts)

    with monkeypatch.context() as patched:
        patched.setattr(encoding, "_decoded", other_version)
        exported = Bundles(store, SECRET).export("Ann")[1]
        samples = store.read_audio(sha).samples
    forged = packed(unsigned(entries(exported), language="en"))
    with pytest.raises(InvalidBundleError, match="not the one that it names"):
        Bundles(other, SECRET).import_voice(forged)
    imported = Bundles(other, SECRET).import_voice(exported)
    assert imported.done.record.audio_sha256 == sha and imported.num_kept == 1
    found = other.read_audio(sha)
    assert found.samples.tobytes() == samples.tobytes()
    assert found.clip_starts == decoded.audio.clip_starts
    again = Bundles(other, SECRET).export("Ann")[1]
    Bundles(store, SECRET).import_voice(again, on_conflict="replace")
    assert store.read_audio(sha).samples.tobytes() == decoded.audio.samples.tobytes()


WRONG_CUTS = {
    "none": [],
    "one": [0],
    "another": [0, 30_001],
    "not from the beginning": [5, 30_000],
    "unsorted": [0, 40_000, 30_000],
    "twice": [0, 30_000, 30_000],
    "behind the end": [0, 70_000],
    "huge": [0, 2**40],
    "larger than an integer": [0, 10**300],
    "negative": [0, -5],
    "no numbers": [0, "30000"],
    "fractions": [0, 30_000.5],
    "too many": list(range(0, 70_000, 1_000)),
    "short clips": [0, 30_000, 30_001],
    "null": None,
}


@pytest.mark.parametrize(
    "told",
    [*({"clip_starts": cuts} for cuts in WRONG_CUTS.values()), {"ref_text": "one"}],
    ids=[*WRONG_CUTS, "not a line for each"],
)
def test_a_bundle_with_other_cuts_is_refused_whole(of_two_clips, other, told):
    data = packed(unsigned(entries(of_two_clips[2]), **told))
    with pytest.raises(SpeakerRequestError):
        Bundles(other, SECRET).import_voice(data)
    assert other.num_speakers() == 0


def test_a_recording_that_is_no_audio_is_refused(exported, other):
    found = entries(exported[2])
    consent = next(name for name in found if name.startswith("consent"))
    files = {n: d for n, d in found.items() if n not in ("voice.json", "signature")}
    told = msgspec.json.decode(found["voice.json"], type=bundle_format.BundledVoice)
    data = bundle_format.write(told, files | {consent: b"noise"}, SECRET.encode())
    with pytest.raises(SpeakerRequestError):
        Bundles(other, SECRET).import_voice(data)
    assert other.num_speakers() == 0


@pytest.mark.sqlite
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_the_same_voice(exported, other, data):
    damaged = bytearray(exported[2])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] ^= data.draw(st.integers(1, 255))
    bundles = Bundles(other, SECRET)
    with suppress(SpeakerRequestError):
        done = bundles.import_voice(bytes(damaged), on_conflict="replace").done
        assert done.record.audio_sha256 == exported[0].audio_sha256
