"""What tenants have is counted and bounded for each, and told to none of another."""

import pytest

from tests.encoding_samples import make_encoding
from tests.store_samples import address, clip, key, publish, register, voice
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.changes import SpeakerChanges
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.catalogue.tenant_usage import TenantUsage
from vllm_tts_cache.errors import (
    AudioBudgetError,
    ConsentLimitError,
    ConsentNotFoundError,
    PinLimitError,
    SpeakerLimitError,
    SpeakerNotFoundError,
)
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.store.preview_kinds import preview_kind
from vllm_tts_cache.tenants import Limits

A, B = "acme", "zenith"
KIND = key().encoder_fingerprint


def used(store, tenant):
    return store.catalogue.usage_of(tenant)


def num_bytes(store, number=0):
    with store.catalogue.database.read() as db:
        row = schema.stored_file
        query = row.select().where(
            row.c.audio_sha256 == address(number), row.c.kind == "audio"
        )
        return db.execute(query).one().num_bytes


def add(store, name, number=0, tenant=A, limits=None, **fields):
    new = voice(name, clip(number), tenant=tenant, **fields)
    done = store.register(new, clip(number), limits=limits or Limits())
    if done.deletion is not None:
        store.remove_files(done.deletion)
    return done


# -------- counts


def test_a_clip_counts_once_for_each_tenant_that_has_it(store):
    for name in ("ann", "bea"):
        add(store, name)
    add(store, "ann", tenant=B, is_pinned=True)
    recording = store.consents.add("Ann", "de", clip(), A)
    size = num_bytes(store)
    expected = TenantUsage(num_voices=2, num_consents=1, audio_bytes=size)
    assert used(store, A) == expected
    assert used(store, B) == TenantUsage(num_voices=1, num_pinned=1, audio_bytes=size)
    assert store.catalogue.count() == 3
    for name in ("ann", "bea"):
        store.remove_files(store.delete(name, A))
    assert used(store, A) == TenantUsage(num_consents=1, audio_bytes=size)
    store.remove_files(store.consents.delete(recording.consent_id, A))
    assert used(store, A) == TenantUsage()
    assert store.catalogue.usage_of_tenants()[B].audio_bytes == size


def test_what_is_replaced_changed_or_without_audio_is_counted_right(store):
    add(store, "ann", 0)
    add(store, "ann", 1, is_pinned=True)
    assert used(store, A) == TenantUsage(
        num_voices=1, num_pinned=1, audio_bytes=num_bytes(store, 1)
    )
    add(store, "ann", 1, ref_text="words")
    assert used(store, A).audio_bytes == num_bytes(store, 1)
    assert used(store, A).num_pinned == 0
    for pinned in (True, True, False):
        store.change("ann", SpeakerChanges({"is_pinned": pinned}), A)
        assert used(store, A).num_pinned == pinned
    replaced = store.register(voice("ann", None, tenant=A), None)
    store.remove_files(replaced.deletion)
    assert used(store, A) == TenantUsage(num_voices=1)


@pytest.mark.parametrize("table", [schema.tenant_usage, schema.tenant_audio])
def test_counts_that_are_wrong_are_found_and_put_right(store, table):
    add(store, "ann", is_pinned=True, labels={"Team": "Red"})
    add(store, "bea", 1, tenant=B)
    store.consents.add("Ann", "de", clip(2), B)
    right = store.catalogue.usage_of_tenants()
    with store.catalogue.database.write() as db:
        db.execute(table.delete().where(table.c.tenant == A))
    assert len(store.verify()) >= 1
    assert store.recover() != []
    assert store.catalogue.usage_of_tenants() == right
    assert store.verify() == []


LABELS_OF_VERSION_4 = (
    """CREATE TABLE speaker_label (generation BIGINT NOT NULL, label_key TEXT NOT NULL,
    label_value TEXT NOT NULL, PRIMARY KEY (generation, label_key))""",
    "CREATE INDEX speaker_label_value ON speaker_label (label_key, label_value)",
    """INSERT INTO speaker_label SELECT generation, 'team', 'red' FROM speaker
    WHERE name = 'ann'""",
)


def test_a_catalogue_of_before_is_counted_when_it_is_migrated(open_here):
    store = open_here()
    add(store, "ann", is_pinned=True)
    add(store, "bea", 1, tenant=B)
    store.consents.add("Ann", "de", clip(1), B)
    right = store.catalogue.usage_of_tenants()
    tables = schema.tenant_usage, schema.tenant_audio, schema.tenant_encoding
    with store.catalogue.database.write() as db:
        for table in tables:
            table.drop(db)
        db.exec_driver_sql("ALTER TABLE deletion DROP COLUMN tenant")
        schema.speaker_label.drop(db)
        for statement in LABELS_OF_VERSION_4:
            db.exec_driver_sql(statement)
        db.execute(schema.schema_version.update().values(version=4))
    store.close()
    again = open_here()
    assert again.catalogue.usage_of_tenants() == right
    labelled = Page(limit=9, labels={"team": "red"}, tenant=A)
    assert again.catalogue.names(labelled) == ["ann"]
    again.remove_files(again.delete("ann", A))
    assert again.verify() == []


# -------- limits


def test_a_tenant_has_as_many_voices_and_recordings_as_it_may(store):
    limits = Limits(max_voices=1)
    add(store, "ann", limits=limits)
    add(store, "ann", 1, limits=limits)  # the same one
    with pytest.raises(SpeakerLimitError, match=r"1 voices .* max_voices"):
        add(store, "bea", limits=limits)
    store.consents.add("Ann", "de", clip(), A, limits)
    with pytest.raises(ConsentLimitError, match="max_voices"):
        store.consents.add("Bea", "de", clip(), A, limits)
    add(store, "bea", tenant=B, limits=limits)
    assert store.catalogue.count() == 2


def test_a_tenants_audio_has_as_many_bytes_as_it_may_and_no_file_stays(store):
    add(store, "big", 0, tenant=B)
    limits = Limits(max_audio_bytes=num_bytes(store))
    add(store, "ann", 0, limits=limits)
    add(store, "bea", 0, limits=limits)  # it counts once
    for tried in (
        lambda: add(store, "cid", 1, limits=limits),
        lambda: store.consents.add("Cid", "de", clip(1), A, limits),
    ):
        with pytest.raises(AudioBudgetError, match="max_audio_bytes"):
            tried()
    assert not store.has_audio(address(1)) and store.files.kinds(address(1)) == set()
    assert store.find("cid", A) is None
    add(store, "cid", 1, tenant=B)


def test_a_tenant_pins_as_many_voices_as_it_may(store):
    limits = Limits(max_pinned=1)
    add(store, "ann", is_pinned=True, limits=limits)
    with pytest.raises(PinLimitError, match="max_pinned"):
        add(store, "bea", is_pinned=True, limits=limits)
    add(store, "bea", limits=limits)
    pin = SpeakerChanges({"is_pinned": True})
    with pytest.raises(PinLimitError):
        store.change("bea", pin, A, limits)
    add(store, "ann", tenant=B, is_pinned=True, limits=limits)
    assert (used(store, A).num_pinned, used(store, B).num_pinned) == (1, 1)


def test_the_limits_of_all_together_stay(open_here):
    store = open_here(max_uploaded=2, max_pinned=1)
    add(store, "ann", is_pinned=True)
    add(store, "ann", tenant=B)
    with pytest.raises(SpeakerLimitError, match="SPEAKER_MAX_UPLOADED"):
        add(store, "bea", limits=Limits(max_voices=9))
    with pytest.raises(PinLimitError, match="SPEAKER_CACHE_MAX_PINNED"):
        store.change("ann", SpeakerChanges({"is_pinned": True}), B)
    assert store.verify() == []


# -------- what crosses


def test_ids_and_deletions_of_another_tenant_are_of_nobody(store):
    ann = add(store, "ann").record
    recording = store.consents.add("Ann", "de", clip(1), A)
    for ask in (
        lambda: store.delete(ann.speaker_id, B),
        lambda: store.change(ann.speaker_id, SpeakerChanges({"name": "x"}), B),
        lambda: store.change("ann", SpeakerChanges({"name": "x"}), B),
    ):
        with pytest.raises(SpeakerNotFoundError):
            ask()
    for ask in (store.consents.get, store.consents.delete):
        with pytest.raises(ConsentNotFoundError):
            ask(recording.consent_id, B)
    assert store.find(ann.speaker_id, B) is None
    page = Page(limit=9, after=ann.speaker_id, tenant=B)
    assert store.catalogue.names(page) == []
    store.delete(ann.speaker_id, A)
    for name in ("ann", ann.speaker_id):
        assert store.progress(name, B) is None
        assert store.progress(name, A) is not None
    unfinished = store.catalogue.num_unfinished_deletions
    assert (unfinished(), unfinished(A), unfinished(B)) == (1, 1, 0)
    store.recover()


def test_a_voice_may_stand_on_a_recording_of_its_own_tenant_only(store):
    recording = store.consents.add("Ann", "de", clip(1), A)
    mine = add(store, "ann", consent=recording.consent_id).record
    theirs = add(store, "ann", tenant=B, consent=recording.consent_id).record
    assert mine.consent_id == recording.consent_id
    assert theirs.consent_id is None


# -------- what a tenant is told


def told(store, tenant, name="ann"):
    return store.find_told(name, tenant).fingerprints


def test_what_another_had_encoded_is_told_to_whoever_asked(store):
    add(store, "ann")
    add(store, "ann", tenant=B)
    store.ask(A, address(), [KIND])
    assert store.asked(A, address()) == {KIND}
    assert store.told(A, address()) == frozenset()
    publish(store)
    store.tell(A, address(), [KIND])
    assert told(store, A) == store.told(A, address()) == {KIND}
    assert told(store, B) == store.asked(B, address()) == frozenset()
    assert store.find("ann", B).fingerprints == {KIND}
    store.tell(B, address(), [KIND])
    store.tell(B, address(), [KIND])
    assert told(store, B) == {KIND}
    # Encoded anew, by force: everybody knows that it is there.
    publish(store)
    assert (told(store, A), told(store, B)) == ({KIND}, {KIND})


def test_what_was_told_goes_with_the_encoding_and_with_the_tenants_last_voice(store):
    for tenant in (A, B):
        add(store, "ann", tenant=tenant)
    add(store, "bea")
    publish(store)
    for tenant in (A, B):
        store.tell(tenant, address(), [KIND])
    add(store, "ann", ref_text="other words")  # of the same clip
    store.remove_files(store.delete("ann", A))
    assert told(store, A, "bea") == {KIND}
    store.remove_files(store.delete("bea", A))
    assert store.asked(A, address()) == frozenset()
    assert told(store, B) == {KIND}
    store.remove_files(store.delete("ann", B))
    add(store, "ann", tenant=B)
    assert told(store, B) == store.asked(B, address()) == frozenset()


def test_what_is_told_too_late_of_a_voice_that_was_deleted_is_written_nowhere(store):
    """Its encodings were made for somebody else, who has the same clip."""
    for tenant in (A, B):
        add(store, "ann", tenant=tenant)
    publish(store)
    store.remove_files(store.delete("ann", B))
    for note in (store.ask, store.tell):
        note(B, address(), [KIND], Segment.REGISTERED)
    assert store.asked(B, address()) == frozenset()
    store.tell(A, address(), [KIND], Segment.REGISTERED)
    assert told(store, A) == {KIND}


def test_nothing_is_told_of_audio_that_is_not_there(store):
    for note in (store.ask, store.tell):
        note(A, address(), [KIND])
    assert store.asked(A, address()) == frozenset()


def test_whoever_was_alone_knows_of_its_own_encodings(store):
    register(store, "ann", 0)
    register(store, "bea", 1)
    add(store, "cid", 2)
    for number in range(3):
        publish(store, number)
    store.take_tenant_in("default")
    for number in (0, 1):
        assert store.told("default", address(number)) == {KIND}
    assert store.told("default", address(2)) == store.told(A, address(2)) == frozenset()
    publish(store, 0, "f")
    store.take_tenant_in("default")
    assert store.told("default", address(0)) == {KIND}


# -------- previews


def test_whoever_was_alone_has_no_previews_among_its_encodings(store):
    """They would be in its bundles, which nobody could import."""
    register(store, "ann", 0)
    publish(store, 0)
    kind = keep_preview(store, "default", "Hello.")
    store.take_tenant_in("default")
    assert store.told("default", address(0)) == {KIND}
    # As an older version took it in.
    store.tell("default", address(0), [kind])
    assert store.find_told("ann", "default").fingerprints == {KIND}


def keep_preview(store, tenant, text):
    kind = preview_kind(tenant, text)
    preview = EncodingKey(audio_sha256=address(), encoder_fingerprint=kind)
    store.publish_preview(preview, make_encoding(0), tenant)
    return kind


def test_a_tenants_previews_stay_when_another_of_the_same_clip_goes(store):
    for tenant in (A, B):
        add(store, "ann", tenant=tenant)
    assert preview_kind(A, "hello") != preview_kind(B, "hello")
    mine = [keep_preview(store, A, str(number)) for number in range(6)]
    theirs = keep_preview(store, B, "0")
    kinds = store.stored_kinds([address()])[address()] - {"audio"}
    assert kinds == {*mine[2:], theirs}
    done = store.change("ann", SpeakerChanges({"ref_text": "words"}), A)
    store.remove_files(done.deletion)
    assert store.files.kinds(address()) == {"audio", theirs}
    keep_preview(store, A, "1")
    store.remove_files(store.delete("ann", A))
    assert store.files.kinds(address()) == {"audio", theirs}
