import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from tests.store_samples import delete, register, register_vector, traces, voice
from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import SpeakerChanges
from vllm_tts_cache.errors import StorageFullError
from vllm_tts_cache.store.stock_import import import_stock_voices
from vllm_tts_cache.store.writer import Writer

RATE = 24000


def get(store, name="ana") -> Any:
    found = store.find(name)
    return None if found is None else found.record


@pytest.fixture
def write(store):
    """Writes a voice as stock does; fields that are None are left out."""

    def write_(name: str, created_at: int = 1000, tensors=None, file_name=None, **more):
        fields = {
            "name": name,
            "voice_name_lower": name.lower(),
            "consent": "consent-1",
            "created_at": created_at,
            "mime_type": "audio/wav",
            "original_filename": "me.wav",
            "file_size": 77,
            "sample_rate": RATE,
            "embedding_source": "audio",
        } | more
        header = {k: str(v) for k, v in fields.items() if v is not None}
        if tensors is None:
            tensors = {"audio": np.full(RATE, created_at / 1e6, np.float32)}
        path = store.directory / (file_name or f"{name}_c_{created_at}.safetensors")
        save_file(tensors, path, metadata=header)
        return path

    return write_


@pytest.mark.every_backend
def test_a_second_import_opens_nothing(write, store):
    path = write("a")
    (store.directory / "foreign.safetensors").write_bytes(b"?")
    import_stock_voices(store)
    # Opened again, the voice would be found broken and reported.
    stamp = path.stat()
    path.write_bytes(b"\0" * stamp.st_size)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    report = import_stock_voices(store)
    assert (report.imported, report.skipped) == ([], [])


def test_the_newest_file_of_a_name_wins_whatever_files_are_called(write, store):
    write("Ana", 3000, file_name="a.safetensors", ref_text="new")
    write("ana", 1000, file_name="z.safetensors", ref_text="old")
    write("bob", 5, file_name="b1.safetensors", ref_text="first")
    write("bob", 5, file_name="b2.safetensors", ref_text="second")
    report = import_stock_voices(store)
    assert sorted(report.imported) == ["Ana", "bob"]
    assert dict(report.skipped).keys() == {"z.safetensors", "b1.safetensors"}
    assert get(store).ref_text == "new"
    assert get(store, "bob").ref_text == "second"
    assert import_stock_voices(store).skipped == []


def test_a_registered_voice_that_is_newer_stays(write, store):
    write("ana", 1000)
    mine = register_vector(store, "ANA")
    report = import_stock_voices(store)
    assert (report.imported, len(report.skipped)) == ([], 1)
    assert get(store) == mine
    assert store.usage()[Segment.REGISTERED]["audio"].num_files == 0


def test_a_newer_file_replaces_a_voice_unless_it_is_immutable(write, store, open_here):
    write("ana", 1000)
    import_stock_voices(store)
    strict = open_here(registration_policy="immutable", import_stock=False)
    write("ana", 2000)
    assert import_stock_voices(strict).imported == []
    assert get(store).created_at == 1000
    write("ana", 3000)
    assert import_stock_voices(store).imported == ["ana"]
    assert get(store).created_at == 3000


@pytest.mark.every_backend
def test_a_deleted_voice_never_returns_and_its_files_are_gone(write, store):
    # Stock dates a voice ahead of the clock when several come in one second.
    ahead = int(time.time()) + 30
    paths = [write("ana", ahead), write("ana", 900), write("Ana", 901)]
    other = write("bob")
    kept = [path.read_bytes() for path in paths]
    import_stock_voices(store)
    sha = get(store).audio_sha256
    delete(store, "ANA")
    assert [path.exists() for path in [*paths, other]] == [False] * 3 + [True]
    for text in (sha, "ana_c_", "Ana_c_"):
        assert traces(store.directory, text) == []
    paths[0].write_bytes(kept[0])  # out of a backup
    write("ana", 900, file_name="copy.safetensors")
    assert (import_stock_voices(store).imported, get(store)) == ([], None)
    write("ana", ahead + 60)
    assert import_stock_voices(store).imported == ["ana"]


def test_a_file_that_changes_once_its_voice_is_deleted_goes_too(write, store):
    path = write("ana", 1000)
    import_stock_voices(store)
    deletion = store.registrations.delete("ana")
    os.utime(path)
    assert (import_stock_voices(store).imported, get(store)) == ([], None)
    store.remove_files(deletion)
    assert not path.exists()


def test_what_stock_wrote_since_under_the_name_of_a_deleted_file_is_kept(write, store):
    path = write("ana", 1000)
    import_stock_voices(store)
    deletion = store.registrations.delete("ana")
    write("bob", 2000, file_name=path.name)
    store.remove_files(deletion)
    assert path.exists()
    assert import_stock_voices(store).imported == ["bob"]


@pytest.mark.parametrize("is_embedding", [False, True])
def test_a_voice_of_another_clip_takes_stocks_files_with_it(write, store, is_embedding):
    """Going back to stock found the person who had been replaced."""
    tensors = {"speaker_embedding": np.ones((1, 3), np.float32)}
    paths = [write("ana", 900), write("ana", 1000, tensors if is_embedding else None)]
    other = write("bob")
    kept = paths[1].read_bytes()
    import_stock_voices(store)
    done = register(store, "ana", 1)
    assert paths[1].exists()
    store.remove_files(done.deletion)
    assert [path.exists() for path in [*paths, other]] == [False, False, True]
    assert traces(store.directory, "ana_c_") == []
    assert store.verify() == []
    delete(store, "ana")
    paths[1].write_bytes(kept)  # out of a backup
    assert (import_stock_voices(store).imported, get(store)) == ([], None)


def test_stocks_file_stays_where_the_same_clip_is_registered_anew(write, store):
    path = write("ana", 1000)
    import_stock_voices(store)
    audio = DecodedAudio(store.read_audio(get(store).audio_sha256), ())
    new = voice("ana", audio, ref_text="other words")
    done = store.registrations.register(new, audio)
    store.remove_files(done.deletion)
    assert path.exists()  # going back to stock finds its voice
    delete(store, "ana")
    assert not path.exists()


@pytest.mark.parametrize("is_same", [True, False])
def test_stocks_file_of_an_embedding_stays_where_it_is_the_same(write, store, is_same):
    """As a clip's; it went, and going back to stock found no voice."""
    tensors = {"speaker_embedding": np.full((1, 3), 0.1, np.float32)}
    path = write("ana", 1000, tensors)
    import_stock_voices(store)
    # As a client sends it: float32 is what is kept, and what is compared.
    values = (0.1, 0.1, 0.1 if is_same else 0.2)
    done = store.registrations.register(voice("Ana", None, embedding=values), None)
    if done.deletion is not None:
        store.remove_files(done.deletion)
    assert path.exists() is is_same
    delete(store, "ana")
    assert not path.exists()


def test_stocks_files_go_with_their_renamed_voice_alone(write, store):
    paths = [write("ana", 1000)]
    import_stock_voices(store)
    paths.append(write("ana", 2000))
    assert import_stock_voices(store).imported == ["ana"]
    assert [path.exists() for path in paths] == [True, True]
    register_vector(store, "ana", tenant="other")
    store.registrations.change("ana", SpeakerChanges({"name": "cleo"}), "other")
    store.registrations.change("ana", SpeakerChanges({"name": "bea"}))
    delete(store, "bea")
    assert [path.exists() for path in paths] == [False, False]


def test_a_name_that_another_tenant_deletes_is_still_taken_over(write, store):
    path = write("ana", 1000)
    import_stock_voices(store)
    register_vector(store, "ana", tenant="other")
    store.remove_files(store.registrations.delete("ana", "other"))
    assert path.exists()
    write("ana", 2000)
    assert import_stock_voices(store).imported == ["ana"]


def test_the_limits_do_not_apply(write, open_here):
    for name in "abc":
        write(name)
    small = open_here(max_uploaded=1, audio_max_bytes=1, import_stock=False)
    assert import_stock_voices(small).imported == ["a", "b", "c"]


ONES = {"audio": np.ones(9, np.float32)}
FOREIGN = {
    "garbage": b"no safetensors at all",
    "endless header": b"\xff" * 64,
    "deep header": (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "listed header": b"\2\0\0\0\0\0\0\0[]",
    "no metadata": save(ONES),
    "foreign metadata": save(ONES, metadata={"format": "pt"}),
    "empty": b"",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_reported_once_and_hides_no_voice(data, write, store):
    (store.directory / "x.safetensors").write_bytes(data)
    write("ana")
    report = import_stock_voices(store)
    assert report.imported == ["ana"]
    assert [name for name, _ in report.skipped] == ["x.safetensors"]
    assert import_stock_voices(store).skipped == []


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tensors": {"other": np.ones(9, np.float32)}}, "neither"),
        ({"tensors": {"audio": np.ones((2, 2, 2), np.float32)}}, "of shape"),
        ({"tensors": {"audio": np.ones(9, np.int16)}}, "int16"),
        ({"tensors": {"audio": np.full(9, np.nan, np.float32)}}, "no numbers"),
        ({"tensors": {"speaker_embedding": np.full(9, np.inf, np.float32)}}, "65,504"),
        ({"tensors": {"speaker_embedding": np.ones(9, np.int32)}}, "int32"),
        ({"sample_rate": None}, "sample rate"),
        ({"sample_rate": "often"}, "sample rate"),
        ({"name": "a/b", "file_name": "x.safetensors"}, "URL"),
    ],
)
def test_a_voice_that_cannot_be_used_is_reported_with_why(write, store, more, reason):
    write(**({"name": "x"} | more))
    ((_, why),) = import_stock_voices(store).skipped
    assert reason in why
    assert store.num_speakers() == 0


def test_a_truncated_voice_is_tried_again_when_it_is_complete(write, store):
    path = write("ana")
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    assert len(import_stock_voices(store).skipped) == 1
    path.write_bytes(data)
    assert import_stock_voices(store).imported == ["ana"]


def test_a_date_that_is_no_number_is_taken_from_the_file(write, store):
    path = write("ana", created_at="yesterday", tensors=ONES)
    import_stock_voices(store)
    assert get(store).created_at == pytest.approx(path.stat().st_mtime)


def test_names_that_are_no_files_are_reported(store):
    (store.directory / "directory.safetensors").mkdir()
    (store.directory / "nowhere.safetensors").symlink_to("nowhere")
    (store.directory / os.fsdecode(b"\xff.safetensors")).touch()
    assert len(import_stock_voices(store).skipped) == 3


def test_a_full_disk_ends_the_import_and_the_next_goes_on(write, store, monkeypatch):
    for n, name in enumerate("abc"):
        write(name, 1000 + n)
    place, placed = store.blobs.place, []

    def full_after_one(*args):
        if placed:
            raise StorageFullError()
        placed.append(args)
        place(*args)

    with monkeypatch.context() as patched:
        patched.setattr(store.blobs, "place", full_after_one)
        with pytest.raises(StorageFullError):
            import_stock_voices(store)
    assert store.names(Page(limit=9)) == ["a"]
    assert import_stock_voices(store).imported == ["b", "c"]


@pytest.mark.every_backend
def test_imports_at_once_take_each_voice_once(write, open_here):
    for n in range(10):
        write(f"v{n}", 1000 + n)
    stores = [open_here(import_stock=False) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(import_stock_voices, stores))
    imported = [name for report in reports for name in report.imported]
    assert sorted(imported) == [f"v{n}" for n in range(10)]
    assert stores[0].usage()[Segment.REGISTERED]["audio"].num_files == 10


@pytest.mark.every_backend
def test_a_clip_that_goes_meanwhile_is_stored(write, open_here, store, monkeypatch):
    """Its voice was imported, and its audio lost for good."""
    other = open_here(import_stock=False)
    write("bob", 1000)
    import_stock_voices(store)
    write("ana", 2000, tensors={"audio": np.full(RATE, 1000 / 1e6, np.float32)})
    is_kept, found = Writer.is_kept, []

    def found_and_gone(writer, sha, **how):
        found.append(is_kept(writer, sha, **how))
        if other.find("bob") is not None:
            delete(other, "bob")
        return found[-1]

    monkeypatch.setattr(Writer, "is_kept", found_and_gone)
    assert import_stock_voices(store).imported == ["ana"]
    assert found == [True]  # and after it has gone nobody asks
    record = store.find("ana").record
    assert store.read_audio(record.audio_sha256) is not None
