import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from tests.audio_clips import ffmpeg_bytes, voiced
from tests.encoding_samples import assert_same, make_encoding
from tests.store_samples import (
    address,
    clip,
    delete,
    key,
    opened,
    publish,
    register,
    traces,
    voice,
)
from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import schema, stored_files
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import IdempotencyKey
from vllm_tts_cache.store.consents import NewConsent
from vllm_tts_cache.store.encoding import EncodingKey

pytestmark = pytest.mark.every_backend

REGISTERED, INLINE = Segment.REGISTERED, Segment.INLINE


def stored_since(store, file_id):
    with store.database.read() as db:
        return stored_files.since(db, file_id, 1000)


def files(store, segment, artifact="audio"):
    return store.usage()[segment][artifact].num_files


def stored_paths(store):
    return [path for path in store.files.store.rglob("*") if path.is_file()]


def test_registering_stores_row_and_audio_in_one_directory(store):
    record = register(store, "Ann").record
    assert publish(store)
    found = store.find("ann")
    assert (found.record, found.fingerprints) == (record, {"e" * 64})
    sha = address()
    folder = store.directory / "store" / sha[:2] / sha
    assert {path.parent for path in stored_paths(store)} == {folder}
    assert np.array_equal(store.read_audio(sha).samples, clip().audio.samples)
    assert_same(store.read(key()), make_encoding())


def test_an_upload_is_stored_no_larger_than_it_came(store):
    data = ffmpeg_bytes(voiced(), 24_000, "mp3", "libmp3lame")
    audio = decode(data)
    store.registrations.register(voice("Ann", audio), audio)
    usage = store.usage()[REGISTERED]["audio"]
    assert usage.num_bytes < 1.1 * len(data) + 1000
    assert stored_paths(store)[0].stat().st_size == usage.num_bytes
    read = store.read_audio(audio.audio.audio_sha256)
    assert np.array_equal(read.samples, audio.audio.samples)


@pytest.mark.parametrize(
    "other", [("Bob", "default"), ("Ann", "other")], ids="of a {0[1]} tenant".format
)
def test_one_clip_of_many_voices_is_stored_once_and_goes_with_the_last(store, other):
    name, tenant = other
    for _ in range(2):  # the same again deletes nothing
        assert register(store, "Ann").deletion is None
    assert register(store, name, tenant=tenant).deletion is None
    publish(store)
    deletion = store.registrations.delete("Ann")
    store.remove_files(deletion)
    assert store.find(name, tenant).fingerprints == {"e" * 64}
    assert store.read_audio(address()) is not None
    store.remove_files(store.registrations.delete(name, tenant))
    assert traces(store.directory, address()) == stored_paths(store) == []


def test_replacing_keeps_what_running_requests_need_until_it_is_carried_out(store):
    register(store, "Ann", 0)
    publish(store, 0)
    deletion = register(store, "ANN", 1).deletion
    assert deletion is not None
    assert deletion.audio_sha256 == address(0)
    assert store.read(key(0)) is not None
    assert publish(store, 0) is False
    store.remove_files(deletion)
    assert store.read(key(0)) is None
    assert traces(store.directory, address(0)) == []
    # Nobody asks for what was replaced: it is remembered no longer.
    assert store.num_unfinished_deletions() == 0


def asked(name, key="key", tenant="default"):
    return IdempotencyKey.of(key, tenant, name)


def register_by(store, its_key, name="Ann", **fields):
    new = voice(name, clip(), idempotency_key=its_key, **fields)
    return store.registrations.register(new, clip())


def test_a_request_is_done_once_by_its_key_whichever_servers_are_asked(store):
    """Also if the first one was killed once it had committed."""
    first = register_by(store, asked("Ann")).record
    with closing(opened(store.directory)) as other:
        again = register_by(other, asked("Ann"))
    assert (again.record, again.deletion) == (first, None)
    usage, stored = store.usage_of("default"), store.usage()[REGISTERED]["audio"]
    assert (usage.num_voices, usage.audio_bytes) == (1, stored.num_bytes)
    theirs = asked("Ann", tenant="other")
    assert register_by(store, theirs, tenant="other").record != first
    with pytest.raises(errors.InvalidSpeakerError, match="Idempotency-Key"):
        register_by(store, asked("Bob"), "Bob")
    end = asked("Ann", "end")
    store.remove_files(store.registrations.delete("Ann", key=end))
    register(store, "Ann", 1)  # another voice of that name
    for repeat in (
        lambda: register_by(store, asked("Ann")),
        lambda: store.registrations.delete("Ann", key=end),
    ):
        with pytest.raises(errors.AlreadyDoneError, match=first.speaker_id):
            repeat()
    assert store.find("Ann").record.audio_sha256 == address(1)


def test_tries_that_come_together_register_one_voice(store):
    with ThreadPoolExecutor(4) as threads:
        tries = [threads.submit(register_by, store, asked("Ann")) for _ in range(4)]
        [record] = {each.result().record for each in tries}
    assert store.names(Page(limit=9)) == ["Ann"]
    assert record.generation == store.find("Ann").record.generation


def test_keys_of_more_than_a_day_ago_go(store):
    for number in range(30):
        register_by(store, asked("Ann", f"old {number}"))
    with store.database.write() as db:
        db.execute(schema.done_request.update().values(done_at=time.time() - 90_000))
    for number in range(5):
        register_by(store, asked("Ann", f"new {number}"))
    with store.database.read() as db:
        assert len(db.execute(schema.done_request.select()).all()) == 5


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"registration_policy": "immutable"}, errors.SpeakerExistsError),
        ({"max_uploaded": 1}, errors.SpeakerLimitError),
        ({"audio_max_bytes": 10_000}, errors.AudioBudgetError),
    ],
)
def test_a_refused_registration_leaves_everything_as_it_was(open_here, settings, error):
    store = open_here(**settings)
    record = register(store, "Ann", 0).record
    store.store_inline(clip(2))
    before = stored_paths(store)
    name = "Ann" if error is errors.SpeakerExistsError else "Bob"
    for number in (1, 2):
        with pytest.raises(error):
            register(store, name, number)
    assert store.find("Ann").record == record
    assert stored_paths(store) == before
    assert files(store, INLINE) == 1
    assert store.recover() == []


def test_a_recording_over_the_budget_leaves_no_file_of_its_voice(open_here):
    store = open_here(audio_max_bytes=10_000)
    said = NewConsent(name="Ann's", language="de", audio=clip(1), tenant="default")
    with pytest.raises(errors.AudioBudgetError):
        store.registrations.register(voice("Ann", clip(0)), clip(0), recording=said)


def test_the_budget_of_audio_counts_what_a_replaced_voice_gives_back(open_here):
    store = open_here(audio_max_bytes=10_000)
    for number in range(3):
        done = register(store, "Ann", number)
        register(store, "same clip, no more bytes", number)
        store.remove_files(store.registrations.delete("same clip, no more bytes"))
        assert (done.deletion is None) == (number == 0)
        if done.deletion is not None:
            store.remove_files(done.deletion)


def test_registering_an_inline_clip_moves_it_and_its_encodings(store):
    store.store_inline(clip())
    publish(store)
    (path,) = [path for path in stored_paths(store) if path.stem == AUDIO]
    before = path.stat().st_ino
    register(store, "Ann")
    assert path.stat().st_ino == before
    assert (files(store, REGISTERED), files(store, REGISTERED, "encodings")) == (1, 1)
    assert (files(store, INLINE), files(store, INLINE, "encodings")) == (0, 0)


def test_registering_an_evicted_inline_clip_moves_the_encodings_that_stayed(open_here):
    store = open_here(inline_audio_max_bytes=1)
    store.store_inline(clip())
    publish(store)
    store.store_inline(clip(1))
    assert store.read_audio(address()) is None
    register(store, "Ann")
    assert files(store, REGISTERED, "encodings") == 1


def test_a_registered_clip_that_comes_inline_stays_registered(store):
    register(store, "Ann")
    store.store_inline(clip())
    assert (files(store, REGISTERED), files(store, INLINE)) == (1, 0)


def test_publishing_again_replaces_and_tells_it_anew(store):
    register(store, "Ann")
    publish(store)
    (number, *encoding), audio = stored_since(store, 0)
    assert (encoding, audio[1:]) == ([address(), "e" * 64], (address(), AUDIO))
    assert stored_since(store, number) == []
    publish(store)
    assert [row[1:] for row in stored_since(store, number)] == [tuple(encoding)]
    assert files(store, REGISTERED, "encodings") == 1


def test_what_is_stored_is_told_by_query(store):
    assert stored_since(store, 0) == []
    for number in range(3):
        register(store, f"{number}", number)
    newest = stored_since(store, 0)[0][0]
    publish(store, 0)
    publish(store, 2, "f")
    rows = stored_since(store, newest)
    assert [row[1:] for row in rows] == [(address(2), "f" * 64), (address(0), "e" * 64)]
    assert stored_since(store, rows[0][0]) == []
    assert store.stored_artifacts([address(0), address(2), address(7)]) == {
        address(0): {AUDIO, "e" * 64},
        address(2): {AUDIO, "f" * 64},
        address(7): frozenset(),
    }
    assert store.has_audio(address(1))
    assert not store.has_audio(address(7))


@pytest.mark.parametrize("bad", ["", "a/b", "../" * 22, "A" * 64, "a" * 63, "a" * 65])
def test_nothing_but_an_address_names_a_path(store, bad):
    audio = EncodingKey(audio_sha256=bad, encoder_fingerprint="e" * 64)
    encoder = EncodingKey(audio_sha256="a" * 64, encoder_fingerprint=bad)
    for call, given in (
        (store.read_audio, bad),
        (store.read, audio),
        (store.read, encoder),
        (store.files.has_any, bad),
    ):
        with pytest.raises(errors.StorageError, match="Not a content address"):
            call(given)


def test_a_deletion_waits_for_everybody_and_tells_how_far_it_is(open_here):
    mine, other = open_here(), open_here()
    register(mine, "Ann")
    for store in (mine, other):
        store.participants.join()
        assert store.participants.deletions_to_confirm() == []
    deletion = mine.registrations.delete("Ann")
    progress = other.progress("ann")
    assert (progress.id, progress.files_removed) == (deletion.id, False)
    assert (progress.waiting_for, progress.is_finished) == (2, False)
    # Before the files are gone there is nothing to confirm: they could be read again.
    assert other.participants.deletions_to_confirm() == []
    mine.remove_files(deletion)
    assert other.participants.deletions_to_confirm() == [deletion]
    mine.participants.confirm(deletion.id)
    mine.acknowledge(deletion.id)  # too early
    assert mine.progress("ann").waiting_for == 1
    assert mine.num_unfinished_deletions() == 1
    other.participants.confirm(deletion.id)
    assert other.participants.deletions_to_confirm() == []
    assert mine.progress("ann").is_finished
    assert traces(mine.directory, address()) == []
    mine.acknowledge(deletion.id)
    assert mine.progress("ann") is None


@pytest.mark.sqlite
def test_whoever_leaves_dies_or_comes_later_is_not_waited_for(open_here):
    mine, leaving, later = open_here(), open_here(), open_here()
    register(mine, "Ann")
    mine.participants.join()
    leaving.participants.join()
    if (child := os.fork()) == 0:
        opened(mine.directory).participants.join()
        os._exit(0)  # as one that is killed: it does not leave
    os.waitpid(child, 0)
    deletion = mine.registrations.delete("Ann")
    mine.remove_files(deletion)
    later.participants.join()
    assert mine.progress("Ann").waiting_for == 2
    leaving.participants.leave()
    assert mine.progress("Ann").waiting_for == 1
    mine.participants.confirm(deletion.id)
    assert mine.progress("Ann").is_finished


@pytest.mark.sqlite
def test_a_child_of_a_participant_is_none_and_does_not_keep_it_alive(open_here):
    store, other = open_here(), open_here()
    register(store, "Ann")
    reader, writer = os.pipe()
    if (parent := os.fork()) == 0:
        participant = opened(store.directory)
        participant.participants.join()
        if os.fork() == 0:
            assert participant.participants.deletions_to_confirm() == []
            os.write(writer, b".")
            time.sleep(30)
        os._exit(0)
    assert os.read(reader, 1) == b"."
    os.waitpid(parent, 0)
    deletion = store.registrations.delete("Ann")
    store.remove_files(deletion)
    assert other.progress("Ann").is_finished


def test_no_name_of_a_deleted_voice_is_kept(store):
    register(store, "Annegret", ref_text="what she said", consent="number 4711")
    store.remove_files(store.registrations.delete("Annegret"))
    assert store.progress("ANNEGRET").is_finished
    for text in ("nnegret", "what she said", "4711", address()):
        assert traces(store.directory, text) == []


def test_a_finished_deletion_is_kept_for_a_day(store):
    register(store, "Ann")
    store.remove_files(store.registrations.delete("Ann"))
    store.recover()
    assert store.progress("Ann").is_finished
    rows = schema.deletion
    long_ago = rows.c.requested_at - 25 * 3600
    with store.database.write() as db:
        db.execute(rows.update().values(requested_at=long_ago))
    store.recover()
    assert store.progress("Ann") is None


def test_deleting_a_name_again_tells_of_the_new_deletion(store):
    for number in range(3):
        register(store, "Ann", number)
        store.remove_files(store.registrations.delete("Ann"))
    register(store, "Ann", 3)
    deletion = store.registrations.delete("Ann")
    assert store.progress("Ann").id == deletion.id
    store.remove_files(deletion)
    assert store.progress("Ann").is_finished


def test_a_clip_that_comes_back_before_its_files_go_keeps_them(store):
    """Registered or inline: what has a row stays, what was the deleted voice's goes."""
    for come_back in (
        lambda: register(store, "Bob"),
        lambda: store.store_inline(clip()),
    ):
        register(store, "Ann")
        publish(store, 0, "e")
        publish(store, 0, "f")
        deletion = store.registrations.delete("Ann")
        come_back()
        publish(store, 0, "e")
        store.remove_files(deletion)
        assert store.read_audio(address()) is not None
        assert store.read_here(key(0, "e"))
        assert not store.read_here(key(0, "f"))
        assert store.progress("Ann").is_finished
        assert store.verify() == []
        store.acknowledge(deletion.id)
        if store.find("Bob") is not None:
            delete(store, "Bob")


def test_removing_files_twice_is_harmless_also_after_the_clip_came_back(store):
    register(store, "Ann")
    deletion = store.registrations.delete("Ann")
    store.remove_files(deletion)
    register(store, "Bob")
    store.remove_files(deletion)
    assert store.read_audio(address()) is not None
