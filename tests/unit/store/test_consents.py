"""Consent recordings: kept like audio, and stood on by voices."""

import pytest

from tests.store_samples import address, clip, delete, register
from vllm_tts_cache import errors
from vllm_tts_cache.catalogue.names import CONSENT_PREFIX, is_consent_id, new_id


def finish(store, deletion):
    store.remove_files(deletion)
    store.acknowledge(deletion.id)


@pytest.mark.every_backend
def test_a_recording_is_kept_listed_renamed_and_deleted(store):
    made = [store.consents.add(f"c{n}", "en-US", clip(n)) for n in range(5)]
    assert all(is_consent_id(record.consent_id) for record in made)
    assert store.consents.get(made[1].consent_id) == made[1]
    assert store.consents.on_page(3) == made[:1:-1]
    assert store.consents.on_page(3, made[2].consent_id) == made[1::-1]
    renamed = store.consents.rename(made[1].consent_id, " Ann's ")
    assert renamed.name == "Ann's" and renamed.audio_sha256 == address(1)
    assert store.read_audio(address(1)) is not None
    finish(store, store.consents.delete(made[1].consent_id))
    assert store.read_audio(address(1)) is None
    for ask in (store.consents.get, store.consents.delete):
        with pytest.raises(errors.ConsentNotFoundError):
            ask(made[1].consent_id)


@pytest.mark.every_backend
def test_a_recording_that_voices_stand_on_is_kept_and_says_whose_it_is(store):
    consent = store.consents.add("c", "de", clip(0)).consent_id
    record = register(store, "Ann", 1, consent=consent).record
    assert (record.consent, record.consent_id) == (consent, consent)
    with pytest.raises(errors.ConsentInUseError, match="'Ann'") as caught:
        store.consents.delete(consent)
    assert caught.value.details["voices"] == [{"id": record.speaker_id, "name": "Ann"}]
    delete(store, "Ann")
    assert store.consents.get(consent).consent_id == consent
    finish(store, store.consents.delete(consent))


@pytest.mark.every_backend
def test_an_audio_is_kept_as_long_as_a_voice_or_a_recording_has_it(store):
    consent = store.consents.add("c", "de", clip(0)).consent_id
    register(store, "Ann", 0)
    delete(store, "Ann")
    assert store.read_audio(address(0)) is not None
    register(store, "Ann", 0)
    finish(store, store.consents.delete(consent))
    assert store.read_audio(address(0)) is not None
    delete(store, "Ann")
    assert store.read_audio(address(0)) is None


def test_an_id_of_nothing_is_a_text_like_any_other_where_none_is_needed(store):
    consent = new_id(CONSENT_PREFIX)
    record = register(store, "Ann", consent=consent).record
    assert (record.consent, record.consent_id) == (consent, None)


@pytest.mark.every_backend
def test_there_are_as_many_recordings_as_voices_at_most(open_here):
    store = open_here(max_uploaded=1)
    store.consents.add("c", "de", clip(0))
    with pytest.raises(errors.ConsentLimitError, match="SPEAKER_MAX_UPLOADED"):
        store.consents.add("d", "de", clip(1))
    assert store.read_audio(address(1)) is None


@pytest.mark.parametrize(
    ("name", "language", "field"), [("", "de", "name"), ("c", "deutsch!", "language")]
)
def test_a_label_or_language_that_cannot_be_keeps_nothing(store, name, language, field):
    with pytest.raises(errors.InvalidSpeakerError) as caught:
        store.consents.add(name, language, clip(0))
    assert caught.value.field == field
    assert store.consents.on_page(9) == [] and store.read_audio(address(0)) is None
