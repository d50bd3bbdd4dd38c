"""The store's speakers against a dict, over any sequence of calls."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.store_samples import address, delete, opened, register
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.errors import (
    SpeakerExistsError,
    SpeakerLimitError,
    SpeakerNotFoundError,
)

# Each row is one name to a listener.
SPELLINGS = ("Ana", "ANA ", "ana"), ("Zoë", "ZOE\u0308"), ("Straße", "STRASSE"), ("王",)
NAMES = st.sampled_from([name for spellings in SPELLINGS for name in spellings])
LIMIT = 2


def one_name(name: str) -> int:
    return next(n for n, spellings in enumerate(SPELLINGS) if name in spellings)


class SpeakersMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["overwrite", "immutable"]))
    def open(self, policy):
        self.directory = tempfile.TemporaryDirectory()
        self.open_again = lambda: opened(
            Path(self.directory.name), max_uploaded=LIMIT, registration_policy=policy
        )
        self.store = self.open_again()
        self.policy = policy
        self.model: dict[int, SpeakerRecord] = {}
        self.newest = 0

    @rule(name=NAMES, number=st.sampled_from([0, 1]))
    def register(self, name, number):
        if (old := self.model.get(one_name(name))) and self.policy == "immutable":
            with pytest.raises(SpeakerExistsError):
                register(self.store, name, number)
        elif old is None and len(self.model) >= LIMIT:
            with pytest.raises(SpeakerLimitError):
                register(self.store, name, number)
        else:
            registered = register(self.store, name, number)
            assert registered.record.generation > self.newest
            assert registered.record.name == name.strip()
            assert registered.record.audio_sha256 == address(number)
            self.newest = registered.record.generation
            self.model[one_name(name)] = registered.record
            if registered.deletion is not None:
                self.store.remove_files(registered.deletion)

    @rule(name=NAMES)
    def delete(self, name):
        if self.model.pop(one_name(name), None) is None:
            with pytest.raises(SpeakerNotFoundError):
                self.store.registrations.delete(name)
        else:
            delete(self.store, name)

    @rule(name=NAMES)
    def get(self, name):
        found = self.store.find(name)
        record = None if found is None else found.record
        assert record == self.model.get(one_name(name))

    @rule()
    def reopen(self):
        self.store.close()
        self.store = self.open_again()

    @invariant()
    def agrees(self):
        if hasattr(self, "model"):
            rows = sorted(self.model.values(), key=lambda record: record.name_key)
            assert self.store.records(Page(limit=9)) == rows
            assert self.store.num_speakers() == len(rows)
            for number in (0, 1):
                has = any(row.audio_sha256 == address(number) for row in rows)
                assert self.store.has_audio(address(number)) == has

    def teardown(self):
        if hasattr(self, "store"):
            assert self.store.verify() == []
            assert self.store.recover() == []
            self.store.close()
            self.directory.cleanup()


@pytest.mark.every_backend
def test_the_store_agrees_with_a_dict(engine):
    num_examples = 15 if engine == "sqlite" else 5
    short = settings(max_examples=num_examples, stateful_step_count=15)
    run_state_machine_as_test(SpeakersMachine, settings=short)
