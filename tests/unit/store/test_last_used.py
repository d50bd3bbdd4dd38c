"""Which voices spoke last: what a server that starts again makes ready first."""

import pytest

from tests.store_samples import address, clip, delete, publish, register
from vllm_tts_cache.catalogue.records import DEFAULT_TENANT


def last_used(store, limit=8):
    found = store.last_used(limit)
    assert {tenant for tenant, _ in found} <= {DEFAULT_TENANT}
    return [name for _, name in found]


@pytest.mark.every_backend
def test_the_last_one_comes_first_however_many_encodings_it_has(store):
    for number, name in enumerate(("Ann", "Bob", "Cid", "Dee")):
        register(store, name, number)
        for encoder in "ef":
            publish(store, number, encoder)
    for number in (1, 0):
        store.used([address(number)])
    assert last_used(store) == ["Ann", "Bob", "Dee", "Cid"]
    assert last_used(store, 2) == ["Ann", "Bob"]
    delete(store, "Ann")
    assert last_used(store, 2) == ["Bob", "Dee"]


@pytest.mark.every_backend
def test_of_several_voices_of_one_clip_it_is_the_newest(store):
    for name in ("Ann", "Bob", "Cid"):
        register(store, name, 0)
    register(store, "Dee", 1)
    for number in (1, 0):
        publish(store, number)
    assert last_used(store) == ["Cid", "Dee"]


def test_inline_clips_are_nobodys_and_what_is_not_encoded_has_not_spoken(store):
    store.store_inline(clip(5))
    publish(store, 5)
    register(store, "Ann", 0)
    store.used([address(5)])
    assert last_used(store) == []
    publish(store, 0)
    assert last_used(store) == ["Ann"]
