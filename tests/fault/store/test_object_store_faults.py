"""A real S3 server that is stopped, frozen or cut off, or answers half or with 500."""

import random
import resource
import time
from contextlib import suppress

import pytest

from tests.encoding_samples import assert_same, make_encoding
from tests.fault.faulty_proxy import faulty
from tests.limits import limited
from tests.store_samples import (
    address,
    clip,
    delete,
    key,
    opened,
    publish,
    register,
    settings_of,
)
from vllm_tts_cache.errors import ObjectStoreError, StorageError
from vllm_tts_cache.store import bucket

pytestmark = pytest.mark.bucket
WAIT_SECONDS = 1.0
NUM_SEEDS = 6
NAMES = ("ann", "bob")


@pytest.fixture
def impatient(monkeypatch):
    for name in ("_CONNECT_SECONDS", "_READ_SECONDS", "_ANSWER_SECONDS"):
        monkeypatch.setattr(bucket, name, WAIT_SECONDS)
    monkeypatch.setattr(bucket, "_RETRY_SECONDS", 2 * WAIT_SECONDS)


@pytest.fixture
def proxy(object_server):
    with faulty(int(object_server.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def open_one(tmp_path, object_server, proxy, monkeypatch, impatient):
    """Opens the store of a machine whose bucket is behind the proxy."""
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT", proxy.endpoint)
    url = object_server.url(tmp_path.name)
    catalogue_url = settings_of(tmp_path).catalogue_url
    stores = []

    def open_(name="one"):
        given = {"catalogue_url": catalogue_url, "store_url": url}
        stores.append(opened(tmp_path / name, **given))
        return stores[-1]

    yield open_
    proxy.mode = "whole"
    for store in stores:
        store.recover()
        assert store.verify() == []
        store.close()


@pytest.fixture
def one(open_one):
    """Holds a voice with an encoding."""
    one = open_one("one")
    register(one, "Ann", 0)
    publish(one, 0)
    return one


@pytest.fixture
def other(open_one, one):
    """A machine of the same voices, which has read none of them yet."""
    return open_one("other")


def test_real_s3_server_stores_reads_and_deletes(open_one, object_server, tmp_path):
    one, other = open_one("one"), open_one("other")
    for number in range(3):
        register(one, f"Voice {number}", number)
        assert publish(one, number)
    for number in range(3):
        assert other.read(key(number)) is not None
        assert other.read_audio(address(number)) is not None
    assert one.verify() == []
    for number in range(3):
        delete(one, f"Voice {number}")
    (marker,) = object_server.files(tmp_path.name)
    assert marker.name == "catalogue-id"


@pytest.mark.parametrize("fault", ["refuse", "error", "late"])
def test_what_is_here_speaks_on_and_what_cannot_work_says_so(one, other, proxy, fault):
    proxy.mode = fault
    began = time.monotonic()
    assert one.find("Ann") is not None
    assert one.read_here(key(0)) is not None
    assert one.read_audio(address(0)) is not None
    register(other, "Ann", 0)  # what is stored already is not sent again
    for act in (
        lambda: other.read(key(0)),
        lambda: other.read_audio(address(0)),
        lambda: register(other, "Bob", 1),
        lambda: delete(one, "Ann"),
    ):
        with pytest.raises(ObjectStoreError) as caught:
            act()
        assert "object store" in str(caught.value)
        assert time.monotonic() - began < 40 * WAIT_SECONDS
    proxy.mode = "whole"
    assert other.sweep() == 2  # Ann's, and not Bob's: that may arrive later yet
    assert other.find("Bob") is None
    assert one.find("Ann") is None
    (deletion,) = one.unfinished_deletions()
    one.remove_files(deletion)
    assert other.read(key(0)) is None


def test_a_server_that_is_restarted_is_used_again(other, object_server):
    object_server.stop()
    try:
        with pytest.raises(ObjectStoreError):
            other.read(key(0))
    finally:
        object_server.start()
    assert other.read(key(0)) is not None


@pytest.mark.usefixtures("one")
def test_one_that_starts_while_the_bucket_is_down_speaks_what_it_has(open_one, proxy):
    proxy.mode = "refuse"
    again = open_one("one")
    assert again.read(key(0)) is not None


def test_a_full_disk_keeps_no_copies_and_costs_no_request(one, other):
    with limited(resource.RLIMIT_FSIZE, 10):
        for _ in range(2):  # the second time there is no copy either
            assert_same(other.read(key(0)), make_encoding())
            audio = other.read_audio(address(0))
            assert (audio.samples == clip(0).audio.samples).all()
        register(other, "Bob", 1)
        assert publish(other, 1)
    artifacts = other.files.artifacts
    assert artifacts(address(0)) == artifacts(address(1)) == set()
    assert one.read(key(1)) is not None
    assert other.read(key(0)) is not None and other.read_here(key(0)) is not None


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_answers_at_random_lose_nothing_and_serve_nobody_else(open_one, proxy, seed):
    chance = random.Random(seed)
    stores = [open_one(name) for name in ("one", "other")]
    proxy.mode = "any"
    has = dict.fromkeys(NAMES)  # the clip that a name has
    for _ in range(30):
        store, name = chance.choice(stores), chance.choice(NAMES)
        act = chance.choice([_register, _delete, _publish, _read, _sweep])
        with suppress(StorageError):
            act(store, name, chance.randrange(3), has)
        # What failed was done before that, or not at all: all machines agree on it.
        has[name] = _number_of(stores[0].find(name))
        assert has[name] == _number_of(stores[1].find(name))
    assert proxy.num_faults > 0
    proxy.mode = "whole"
    for store in stores:
        store.recover()
        for number in has.values():
            if number is not None:
                audio = store.read_audio(address(number))
                assert (audio.samples == clip(number).audio.samples).all()


def _register(store, name, number, has):
    before = has[name]
    try:
        done = register(store, name, number)
    except StorageError:
        assert _number_of(store.find(name)) == before
        raise
    assert _number_of(store.find(name)) == number
    if done.deletion is not None:
        store.remove_files(done.deletion)


def _delete(store, name, _number, has):
    if has[name] is not None:
        deletion = store.registrations.delete(name)
        assert store.find(name) is None
        store.remove_files(deletion)


def _publish(store, _name, number, _has):
    store.writer.publish(key(number), make_encoding(number))


def _sweep(store, _name, _number, _has):
    store.sweep()


def _read(store, name, _number, has):
    if (number := has[name]) is not None:
        audio = store.read_audio(address(number))
        assert (audio.samples == clip(number).audio.samples).all()
        if (encoding := store.read(key(number))) is not None:
            assert_same(encoding, make_encoding(number))


def _number_of(found):
    if found is None:
        return None
    return next(n for n in range(3) if address(n) == found.record.audio_sha256)
