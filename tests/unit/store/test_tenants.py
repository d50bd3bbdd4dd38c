"""What tenants have is counted and bounded for each, and shown to none of another."""

import pytest

from tests.store_samples import address, clip, path_of, voice
from vllm_tts_cache import errors
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.owners import TenantUsage
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import SpeakerChanges
from vllm_tts_cache.tenants import Limits

pytestmark = pytest.mark.every_backend

A, B = "acme", "zenith"


def num_bytes(store, number=0):
    return path_of(store, number).stat().st_size


def add(store, name, number=0, tenant=A, limits=None, **fields):
    new = voice(name, clip(number), tenant=tenant, **fields)
    done = store.registrations.register(new, clip(number), limits=limits or Limits())
    if done.deletion is not None:
        store.remove_files(done.deletion)
    return done


# -------- counts


def test_a_clip_counts_once_for_each_tenant_that_has_it(store):
    for name in ("ann", "bea"):
        add(store, name)
    add(store, "ann", tenant=B)
    recording = store.consents.add("Ann", "de", clip(), A)
    size = num_bytes(store)
    expected = TenantUsage(num_voices=2, num_consents=1, audio_bytes=size)
    assert store.usage_of(A) == expected
    assert store.usage_of(B) == TenantUsage(num_voices=1, audio_bytes=size)
    assert store.num_speakers() == 3
    for name in ("ann", "bea"):
        store.remove_files(store.registrations.delete(name, A))
    assert store.usage_of(A) == TenantUsage(num_consents=1, audio_bytes=size)
    store.remove_files(store.consents.delete(recording.consent_id, A))
    assert store.usage_of(A) == TenantUsage()
    assert store.usage_of_tenants()[B].audio_bytes == size


def test_what_is_replaced_changed_or_without_audio_is_counted_right(store):
    add(store, "ann", 0)
    add(store, "ann", 1)
    expected = TenantUsage(num_voices=1, audio_bytes=num_bytes(store, 1))
    assert store.usage_of(A) == expected
    add(store, "ann", 1, ref_text="words")
    assert store.usage_of(A) == expected
    replaced = store.registrations.register(voice("ann", None, tenant=A), None)
    store.remove_files(replaced.deletion)
    assert store.usage_of(A) == TenantUsage(num_voices=1)


@pytest.mark.parametrize("table", [schema.tenant_usage, schema.tenant_audio])
def test_counts_that_are_wrong_are_found_and_put_right(store, table):
    add(store, "ann", labels={"Team": "Red"})
    add(store, "bea", 1, tenant=B)
    store.consents.add("Ann", "de", clip(2), B)
    right = store.usage_of_tenants()
    with store.database.write() as db:
        db.execute(table.delete().where(table.c.tenant == A))
    assert len(store.verify()) >= 1
    assert store.recover() != []
    assert store.usage_of_tenants() == right


# -------- limits


def test_a_tenant_has_as_many_voices_and_recordings_as_it_may(store):
    limits = Limits(max_voices=1)
    add(store, "ann", limits=limits)
    add(store, "ann", 1, limits=limits)  # the same one
    with pytest.raises(errors.SpeakerLimitError, match=r"1 voices .* max_voices"):
        add(store, "bea", limits=limits)
    store.consents.add("Ann", "de", clip(), A, limits)
    with pytest.raises(errors.ConsentLimitError, match="max_voices"):
        store.consents.add("Bea", "de", clip(), A, limits)
    add(store, "bea", tenant=B, limits=limits)
    assert store.num_speakers() == 2


def test_a_tenants_audio_has_as_many_bytes_as_it_may_and_no_file_stays(store):
    add(store, "big", 0, tenant=B)
    limits = Limits(max_audio_bytes=num_bytes(store))
    add(store, "ann", 0, limits=limits)
    add(store, "bea", 0, limits=limits)  # it counts once
    for tried in (
        lambda: add(store, "cid", 1, limits=limits),
        lambda: store.consents.add("Cid", "de", clip(1), A, limits),
    ):
        with pytest.raises(errors.AudioBudgetError, match="max_audio_bytes"):
            tried()
    assert not store.has_audio(address(1))
    assert store.files.artifacts(address(1)) == set()
    assert store.find("cid", A) is None
    add(store, "cid", 1, tenant=B)


def test_the_limits_of_all_together_stay(open_here):
    store = open_here(max_uploaded=2)
    add(store, "ann")
    add(store, "ann", tenant=B)
    with pytest.raises(errors.SpeakerLimitError, match="SPEAKER_MAX_UPLOADED"):
        add(store, "bea", limits=Limits(max_voices=9))


def test_ids_and_deletions_of_another_tenant_are_of_nobody(store):
    ann = add(store, "ann").record
    recording = store.consents.add("Ann", "de", clip(1), A)
    change = SpeakerChanges({"name": "x"})
    for ask in (
        lambda: store.registrations.delete(ann.speaker_id, B),
        lambda: store.registrations.change(ann.speaker_id, change, B),
        lambda: store.registrations.change("ann", change, B),
    ):
        with pytest.raises(errors.SpeakerNotFoundError):
            ask()
    for ask in (store.consents.get, store.consents.delete):
        with pytest.raises(errors.ConsentNotFoundError):
            ask(recording.consent_id, B)
    assert store.find(ann.speaker_id, B) is None
    page = Page(limit=9, after=ann.speaker_id, tenant=B)
    assert store.names(page) == []
    store.registrations.delete(ann.speaker_id, A)
    for name in ("ann", ann.speaker_id):
        assert store.progress(name, B) is None
        assert store.progress(name, A) is not None
    unfinished = store.num_unfinished_deletions
    assert (unfinished(), unfinished(A), unfinished(B)) == (1, 1, 0)
    store.recover()
