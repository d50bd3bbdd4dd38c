"""Two machines with a directory each, one catalogue and one bucket."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import pytest

from tests.cli_runs import printed_by
from tests.encoding_samples import make_encoding
from tests.store_samples import (
    address,
    delete,
    key,
    opened,
    publish,
    register,
    settings_of,
    traces,
)
from vllm_tts_cache.audio.reference import AUDIO
from vllm_tts_cache.catalogue import objects
from vllm_tts_cache.errors import (
    ConfigError,
    EncodingCorruptError,
    ObjectStoreError,
    SourceCorruptError,
    StorageError,
)
from vllm_tts_cache.store.bucket import Bucket, shown
from vllm_tts_cache.store.opening import open_existing

pytestmark = pytest.mark.bucket


@pytest.fixture
def fleet(tmp_path):
    """``open_`` opens the store of a machine; sound when the test ends."""
    urls = settings_of(tmp_path / "one")
    given: Any = {url: getattr(urls, url) for url in ("catalogue_url", "store_url")}
    bucket, stores = Path(urls.store_url.removeprefix("file://")), []

    def open_(name: str = "one", **more: Any):
        stores.append(opened(tmp_path / name, **{**given, **more}))
        return stores[-1]

    yield SimpleNamespace(open=open_, given=given, root=tmp_path, bucket=bucket)
    for store in stores:
        store.recover()
        assert store.verify() == []
        store.close()


def objects_in(fleet) -> list[Path]:
    return [path for path in (fleet.bucket / "objects").rglob("*") if path.is_file()]


def copies_in(store) -> list[Path]:
    return [path for path in store.files.store.rglob("*") if path.is_file()]


def two_machines(fleet):
    """Two, and a voice with its encoding that the first one stored."""
    one, other = fleet.open("one"), fleet.open("other")
    register(one, "Ann", 0)
    assert publish(one, 0)
    return one, other


def test_what_one_machine_stores_another_reads(fleet):
    _, other = two_machines(fleet)
    assert other.find("Ann").fingerprints == {key(0).encoder_fingerprint}
    assert not other.read_here(key(0))
    assert other.read_here(key(0)) is None
    assert other.read_audio(address(0)).audio_sha256 == address(0)
    assert other.read(key(0)) is not None
    assert other.read_here(key(0))
    assert other.read_here(key(0)) is not None
    assert len(objects_in(fleet)) == 2


def test_of_a_deleted_voice_nothing_is_left_anywhere(fleet):
    one, other = two_machines(fleet)
    register(one, "Bob", 0)
    other.read(key(0))
    other.read_audio(address(0))
    delete(one, "Ann")
    other.copies.delete_unstored(address(0))
    assert other.read_here(key(0)) and one.read(key(0)) is not None  # they are Bob's
    delete(one, "Bob")
    assert objects_in(fleet) == []
    assert copies_in(one) == []
    # Each machine is asked, and deletes its own; see `entrypoints.deletions`.
    other.copies.delete_unstored(address(0))
    assert traces(fleet.root, address(0)) == []
    assert other.read(key(0)) is None
    assert other.read_audio(address(0)) is None


def test_a_machine_that_was_away_removes_its_copies_of_what_is_gone(fleet):
    one, other = fleet.open("one"), fleet.open("other")
    for number, name in enumerate(("Ann", "Bob")):
        register(one, name, number)
        publish(one, number)
        other.read(key(number))
    delete(one, "Ann")
    assert len(copies_in(other)) == 2
    assert len(other.recover_copies()) == 1
    assert other.read_here(key(1))
    assert len(copies_in(other)) == 1
    assert traces(other.directory, address(0)) == []
    assert other.recover_copies() == []


def test_a_copy_made_while_its_voice_is_deleted_does_not_stay(fleet, monkeypatch):
    one, other = two_machines(fleet)
    directory = other.copies.directory
    place = directory.place

    def slowly(staged):
        delete(one, "Ann")
        # As its participant, before the copy is there.
        other.copies.delete_unstored(staged.audio_sha256)
        place(staged)

    monkeypatch.setattr(directory, "place", slowly)
    assert other.read(key(0)) is not None  # it was there when it was asked for
    assert copies_in(other) == []


def test_a_replaced_encoding_is_read_anew_and_its_object_goes(fleet):
    one, other = two_machines(fleet)
    before = set(objects_in(fleet))
    one.writer.publish(key(0), make_encoding(0))
    one.sweep()
    after = set(objects_in(fleet))
    assert len(after) == 2
    assert len(before & after) == 1  # the audio's
    assert other.read(key(0)) is not None


def test_a_damaged_copy_is_fetched_again(fleet):
    one, _ = two_machines(fleet)
    for path in copies_in(one):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(EncodingCorruptError):
        one.read_here(key(0))
    assert one.read(key(0)) is not None
    assert one.read_audio(address(0)) is not None


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def test_one_404_deletes_nothing_and_a_later_read_has_it(fleet):
    """The row went, then the object, and then the good copies of other machines."""
    one, other = two_machines(fleet)
    record = one.find("Ann").record
    hidden = {path: path.read_bytes() for path in objects_in(fleet)}
    for path in hidden:
        path.unlink()
    assert other.read_audio(address(0)) is None
    assert other.read(key(0)) is None
    assert other.is_lost(record)
    for path, data in hidden.items():
        path.write_bytes(data)
    assert other.sweep() == 0 and one.recover() == []
    assert not other.is_lost(record)
    for store in (one, other):
        assert store.read_audio(address(0)) is not None
        assert store.read(key(0)) is not None


def test_a_machine_that_flips_bits_in_all_objects_destroys_nothing(fleet, monkeypatch):
    one, bad = fleet.open("one"), fleet.open("bad")
    numbers = range(5)
    records = [register(one, f"Voice {number}", number).record for number in numbers]
    with monkeypatch.context() as patched:
        get = bad.blobs.bucket.get

        def misread(name):
            data = get(name)
            return data if data is None or name == "catalogue-id" else flipped(data)

        patched.setattr(bad.blobs.bucket, "get", misread)
        for number in numbers:
            with pytest.raises(SourceCorruptError):
                bad.read_audio(address(number))
        assert bad.sweep() == 0
        assert all(bad.is_lost(record) for record in records)
    assert one.recover() == []
    assert len(objects_in(fleet)) == len(copies_in(one)) == len(numbers)
    for store in (one, bad):
        assert not any(store.is_lost(record) for record in records)
        for number in numbers:
            assert store.read_audio(address(number)) is not None


def test_damaged_objects_stay_until_they_are_stored_again(fleet):
    one, other = two_machines(fleet)
    record = one.find("Ann").record
    for path in objects_in(fleet):
        path.write_bytes(flipped(path.read_bytes()))
    damaged = set(objects_in(fleet))
    for _ in range(2):
        with pytest.raises(EncodingCorruptError):
            other.read(key(0))
        with pytest.raises(SourceCorruptError):
            other.read_audio(address(0))
    other.sweep()
    assert set(objects_in(fleet)) == damaged
    assert other.is_lost(record)
    register(other, "Ann", 0)
    assert publish(other, 0)
    assert not one.is_lost(record)
    assert one.read(key(0)) is not None
    one.sweep()
    assert len(objects_in(fleet)) == 2
    assert not damaged & set(objects_in(fleet))


def test_verify_tells_of_damage_and_a_machine_with_a_copy_repairs_it(fleet):
    one, other = two_machines(fleet)
    record = one.find("Ann").record
    register(one, "Bob", 1)
    gone, *damaged = sorted(objects_in(fleet), key=lambda p: address(1) not in str(p))
    gone.unlink()
    for path in damaged:
        path.write_bytes(flipped(path.read_bytes()))
    assert len([line for line in one.verify() if line.startswith("corrupt")]) == 2
    assert f"audio {address(1)}: its audio is not there" in one.verify()
    removed = f"{address(0)}: removed a damaged encoding by {'e' * 16}"
    assert other.repair() == [removed]
    assert other.is_lost(record)
    restored = "restored the audio from this machine's copy"
    assert set(one.repair()) == {
        f"{address(0)}: removed 1 copies without a row",  # of the encoding
        *(f"{address(number)}: {restored}" for number in range(2)),
    }
    assert one.verify() == []
    assert not other.is_lost(record)
    for number in range(2):
        assert other.read_audio(address(number)) is not None


def test_an_object_that_fell_short_is_not_taken_for_damaged(fleet):
    _, other = two_machines(fleet)
    whole = {path: path.read_bytes() for path in objects_in(fleet)}
    for path, data in whole.items():
        path.write_bytes(data[:-7])
    with pytest.raises(ObjectStoreError):
        other.read(key(0))
    with pytest.raises(ObjectStoreError):
        other.read_audio(address(0))
    for path, data in whole.items():
        path.write_bytes(data)
    assert other.read(key(0)) is not None
    assert other.read_audio(address(0)) is not None


def test_a_bucket_that_is_not_there_is_not_taken_for_an_empty_one(fleet):
    one, other = two_machines(fleet)
    away = fleet.bucket.with_name("away")
    fleet.bucket.rename(away)
    fleet.bucket.mkdir()
    with pytest.raises(StorageError):
        other.read(key(0))
    with pytest.raises(StorageError):
        other.recover()
    assert one.read_here(key(0)) is not None  # what is here speaks on
    fleet.bucket.rmdir()
    away.rename(fleet.bucket)
    assert other.read(key(0)) is not None


def test_what_a_killed_process_was_storing_goes_in_time(fleet, monkeypatch):
    one = fleet.open()
    monkeypatch.setattr(objects, "MAKING_SECONDS", -1.0)
    one.blobs.stage(b"half a voice", address(0), AUDIO)
    assert len(objects_in(fleet)) == 1
    monkeypatch.setattr(objects, "OVERDUE_SECONDS", 0.0)
    assert any("left behind" in line for line in one.verify())
    assert one.sweep() == 1
    assert objects_in(fleet) == []


def test_who_was_frozen_while_it_stored_stores_again(fleet, monkeypatch):
    one, other = fleet.open("one"), fleet.open("other")
    register(one, "Ann", 0)
    stage = one.blobs.stage

    def late(data, sha, kind):
        staged = stage(data, sha, kind)
        monkeypatch.setattr(one.blobs, "stage", stage)
        delete(other, "Ann")
        register(other, "Ann", 0)
        return staged

    monkeypatch.setattr(one.blobs, "stage", late)
    assert publish(one, 0)  # what it had written was taken away: it wrote it again
    one.sweep()
    assert len(objects_in(fleet)) == 2


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_arrives_behind_its_deletion_is_removed(fleet, monkeypatch, comes_back):
    """The deletion has looked for it, and forgotten it, before it was there."""
    one, other = fleet.open("one"), fleet.open("other")
    register(one, "Ann", 0)
    bucket = one.blobs.bucket
    put = bucket.put

    def late(name, data):
        monkeypatch.setattr(bucket, "put", put)
        delete(other, "Ann")
        if comes_back:
            register(other, "Ann", 0)
        put(name, data)

    monkeypatch.setattr(bucket, "put", late)
    assert publish(one, 0) is comes_back
    one.sweep()
    assert len(objects_in(fleet)) == 2 * comes_back


def test_an_object_that_a_file_has_is_not_swept_whatever_is_noted(fleet):
    """Who was cut off at its commit does not know of it."""
    one = fleet.open()
    register(one, "Ann", 0)
    [name] = [path.relative_to(fleet.bucket).as_posix() for path in objects_in(fleet)]
    with one.database.read() as db:
        objects.release(db, name, address(0))
    assert one.sweep() == 0
    assert one.read_audio(address(0)) is not None


def test_what_an_older_catalogue_does_not_know_is_removed_on_request(fleet):
    """A dump of the database was restored beside the bucket as it is."""
    one, _ = two_machines(fleet)
    announced = one.blobs.stage(b"half a voice", address(1), AUDIO)
    newer = objects.new_name(address(2))
    others = f"objects/{address(2)[:2]}/readme.txt"
    for name in (newer, others):
        path = fleet.bucket / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"of another time")
    assert f"the object {newer} has no row" in one.verify()
    assert one.recover() == []
    assert one.repair() == [f"removed {newer}, which had no row"]
    assert one.repair() == []
    assert not (fleet.bucket / newer).exists()
    for name in (others, announced.object_name):
        assert (fleet.bucket / name).exists()
    assert one.read_audio(address(0)) is not None and one.read(key(0)) is not None
    (fleet.bucket / others).unlink()
    one.blobs.unstage(announced)
    assert one.sweep() == 1


def test_two_machines_that_register_one_clip_store_it_once(fleet):
    stores = [fleet.open(name) for name in ("one", "other")]
    gate = threading.Barrier(2)

    def work(store, name):
        gate.wait()
        for _ in range(5):
            register(store, name, 0)
            publish(store, 0)

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(work, stores, ("Ann", "Bob")))
    stores[0].sweep()
    assert len(objects_in(fleet)) == 2


def test_copies_stay_within_their_budget_and_go_by_their_last_use(fleet):
    one = fleet.open("one")
    for number in range(6):
        register(one, f"Voice {number}", number)
    num_bytes = sum(path.stat().st_size for path in copies_in(one))
    other = fleet.open("other", copies_max_bytes=num_bytes // 2)
    for number in range(6):
        other.read_audio(address(number))
    other.copies.trim()
    kept = copies_in(other)
    assert 0 < sum(path.stat().st_size for path in kept) <= num_bytes // 2
    assert Path(other.files.file_name(address(5), AUDIO)) in kept
    for number in range(6):
        assert other.read_audio(address(number)) is not None


def test_a_catalogue_and_a_bucket_know_each_other(fleet, tmp_path):
    one = fleet.open()
    register(one, "Ann", 0)
    marker = fleet.bucket / "catalogue-id"
    with pytest.raises(ConfigError, match="SPEAKER_STORE_URL"):
        fleet.open("other", store_url="")
    other_bucket = {"store_url": f"file://{tmp_path}/another"}
    before = marker.read_bytes()
    settings = settings_of(tmp_path / "two", **fleet.given | other_bucket)
    with pytest.raises(ObjectStoreError) as caught:
        open_existing(settings)
    assert "is down" in caught.value.log_text
    marker.write_bytes(b"of somebody else")
    with pytest.raises(ConfigError, match="another voice catalogue"):
        fleet.open("other")
    marker.write_bytes(before)


def test_two_servers_that_are_the_first_on_a_new_bucket_both_start(fleet, monkeypatch):
    """The second read the catalogue before the first one's row, and then its marker."""
    get = Bucket.get

    def late(bucket, name):
        monkeypatch.setattr(Bucket, "get", get)
        fleet.open("one")
        return get(bucket, name)

    monkeypatch.setattr(Bucket, "get", late)
    register(fleet.open("other"), "Ann", 0)


def test_of_two_catalogues_that_take_a_bucket_one_has_it(fleet, postgres, monkeypatch):
    """The second one wrote its id over that of the first, which had voices by then."""
    theirs = postgres.url_of(fleet.root / "theirs")
    put = obstore.put

    def late(*args, **options):
        monkeypatch.setattr(obstore, "put", put)
        register(fleet.open("one"), "Ann", 0)
        return put(*args, **options)

    monkeypatch.setattr(obstore, "put", late)
    with pytest.raises(ConfigError, match="another voice catalogue"):
        fleet.open("two", catalogue_url=theirs)
    assert fleet.open("other").read_audio(address(0)) is not None
    elsewhere = f"file://{fleet.root}/another"
    assert fleet.open("two", catalogue_url=theirs, store_url=elsewhere).verify() == []


def test_only_a_server_that_binds_it_marks_a_bucket(fleet):
    """A catalogue whose voices were deleted took any bucket without a mark."""
    one = fleet.open("one")
    register(one, "Ann", 0)
    delete(one, "Ann")
    other = fleet.root / "another"
    other.mkdir()
    urls = {**fleet.given, "store_url": f"file://{other}"}
    with pytest.raises(ObjectStoreError):
        open_existing(settings_of(fleet.root / "two", **urls))
    with pytest.raises(ObjectStoreError) as caught:
        fleet.open("two", **urls)
    assert list(other.iterdir()) == []
    marker = fleet.bucket / "catalogue-id"
    mark = marker.read_text()
    assert mark in caught.value.log_text
    marker.unlink()
    with pytest.raises(ObjectStoreError):
        one.verify()
    assert not marker.exists()
    marker.write_text(mark)


def test_a_server_that_died_before_it_marked_the_bucket_starts_anew(fleet, monkeypatch):
    def dies(*_args, **_options):
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(obstore, "put", dies)
        with pytest.raises(ObjectStoreError):
            fleet.open("one")
    assert not (fleet.bucket / "catalogue-id").exists()
    register(fleet.open("one"), "Ann", 0)


def test_a_store_without_a_bucket_needs_no_client_of_object_stores():
    without = "import sys; sys.modules['obstore'] = None"
    code = f"{without}; import vllm_tts_cache.store.opening"
    assert printed_by(code) == ""


def test_no_secret_of_a_url_is_shown():
    assert shown("s3://key:secret@bucket/a") == "s3://bucket/a"
    assert shown("file:///a/b") == "file:///a/b"


def test_what_is_no_bucket_is_said_so():
    with pytest.raises(ConfigError, match="SPEAKER_STORE_URL"):
        Bucket("nothing://at/all")
