"""Kill -9 at every step of a DELETE: another server finishes it, nothing is left."""

import time
from contextlib import closing
from itertools import product

import pytest
from safetensors.numpy import save_file

from tests.fault.killing import carry_out, confirm_all, killed_deleting, open_here
from tests.lease_times import delete_participants
from tests.store_samples import RATE, address, clip, key, publish, register, traces
from vllm_tts_cache.errors import ConsentNotFoundError

MIN_STEPS = 20  # fewer, and the child has died of something else
WORDS = "what nobody else has said"


class Voice:
    """A voice with a transcript and an encoding; others are as it but for a thing."""

    asked = "Ann"  # the name or id by which its deletion is asked for

    def __init__(self, directory):
        self.directory = directory

    def put_there(self):
        """What is in the directory before a server opens it."""

    def make(self, store):
        register(store, "Ann", ref_text=WORDS)
        publish(store)

    def is_there(self, store):
        return store.find("Ann") is not None

    def delete(self, store):
        return store.registrations.delete("Ann")

    def check(self, store):
        assert not self.is_there(store)

    def traces(self):
        return traces(self.directory, address()) + traces(self.directory, WORDS)


class ImportedVoice(Voice):
    """Stock's file of it is in the directory as well."""

    created_at = 0

    def put_there(self):
        # After the deletion of the one before.
        self.created_at = max(self.created_at, int(time.time())) + 60
        fields = {
            "name": "Ann",
            "consent": WORDS,
            "ref_text": WORDS,
            "created_at": str(self.created_at),
            "sample_rate": str(RATE),
        }
        path = self.directory / f"Ann_{self.created_at}.safetensors"
        save_file({"audio": clip().audio.samples}, path, metadata=fields)

    def make(self, store):
        assert store.find("Ann").record.audio_sha256 == address()
        publish(store)

    def traces(self):
        return [*super().traces(), *self.directory.glob("*.safetensors")]


class VoiceOfSharedClip(Voice):
    """Another voice has its clip, and stays whole."""

    def make(self, store):
        if store.find("Bob") is None:
            register(store, "Bob")
        super().make(store)

    def check(self, store):
        super().check(store)
        assert store.find("Bob").fingerprints == {key().encoder_fingerprint}
        assert store.read_audio(address()) is not None
        assert store.read(key()) is not None

    def traces(self):
        return traces(self.directory, WORDS)


class ConsentRecording(Voice):
    """A recording that no voice stands on."""

    def make(self, store):
        self.asked = store.consents.add(WORDS, "en-US", clip()).consent_id

    def is_there(self, store):
        try:
            return store.consents.get(self.asked) is not None
        except ConsentNotFoundError:
            return False

    def delete(self, store):
        return store.consents.delete(self.asked)


KINDS = Voice, ImportedVoice, VoiceOfSharedClip, ConsentRecording
EACH_RUN = [(Voice, True), (VoiceOfSharedClip, False)]
LONG = [each for each in product(KINDS, (False, True)) if each not in EACH_RUN]
ENGINES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)]


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize(
    ("kind", "is_alone"),
    [*EACH_RUN, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
)
def test_one_killed_at_any_step_is_ended_by_another(tmp_path, engine, kind, is_alone):
    num_steps, is_killed, deleted = 0, True, kind(tmp_path)
    while is_killed:
        num_steps += 1
        deleted.put_there()
        with closing(open_here(tmp_path)) as other:
            if not is_alone:
                other.participants.join()
            deleted.make(other)
            is_killed = killed_deleting(tmp_path, deleted.delete, num_steps)
            if is_alone:
                other.participants.join()  # a server that is started again
            else:
                waits_for(other, deleted)
            finish(other, deleted)
            if engine == "postgresql":
                delete_participants(other)  # whoever was killed, an hour later
            assert deleted.traces() == []
        nothing_is_left(tmp_path, deleted)
    assert num_steps > MIN_STEPS


def waits_for(other, deleted):
    """As long as the other one may remember the voice, nobody is told it is gone."""
    progress = other.progress(deleted.asked)
    if deleted.is_there(other):
        assert progress is None
    else:
        assert progress is not None and progress.waiting_for >= 1


def finish(other, deleted):
    """What a server does in its rounds, and a client that repeats its DELETE."""
    for deletion in other.unfinished_deletions():
        other.remove_files(deletion)
    confirm_all(other)
    if deleted.is_there(other):
        carry_out(other, deleted.delete(other))
    other.participants.delete_dead()
    other.sweep()


def nothing_is_left(directory, deleted):
    with closing(open_here(directory)) as store:
        progress = store.progress(deleted.asked)
        if progress is not None:
            assert progress.is_finished, progress
            store.acknowledge(progress.id)
        assert store.progress(deleted.asked) is None
        assert store.num_unfinished_deletions() == 0
        deleted.check(store)
        assert store.verify() == []
    assert deleted.traces() == []
