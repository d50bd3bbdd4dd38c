"""The registry against a dict, over any sequence of calls."""

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
)

from vllm_tts_cache.catalogue.record import NewSpeaker, SpeakerRecord
from vllm_tts_cache.catalogue.registry import Registry
from vllm_tts_cache.errors import SpeakerExistsError, SpeakerLimitError

# Each row is one name to a listener.
SPELLINGS = (
    ("Ana", "ANA ", "ana"),
    ("Zoë", "ZOE\u0308"),
    ("Straße", "STRASSE"),
    ("王",),
)
NAMES = st.sampled_from([name for spellings in SPELLINGS for name in spellings])
LIMIT = 2


def one_name(name: str) -> int:
    return next(n for n, spellings in enumerate(SPELLINGS) if name in spellings)


class RegistryMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["overwrite", "immutable"]))
    def open(self, policy):
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name) / "voices.sqlite3"
        self.open_again = lambda: Registry(path, max_speakers=LIMIT, policy=policy)
        self.registry = self.open_again()
        self.policy = policy
        self.model: dict[int, SpeakerRecord] = {}
        self.newest = 0

    @rule(name=NAMES, audio=st.sampled_from("ab"))
    def register(self, name, audio):
        new = NewSpeaker(
            name=name, consent="", audio_sha256=audio, num_samples=1, sample_rate_hz=1
        )
        if (old := self.model.get(one_name(name))) and self.policy == "immutable":
            with pytest.raises(SpeakerExistsError):
                self.registry.register(new)
        elif old is None and len(self.model) >= LIMIT:
            with pytest.raises(SpeakerLimitError):
                self.registry.register(new)
        else:
            registered = self.registry.register(new)
            assert registered.replaced == old
            assert registered.record.generation > self.newest
            assert (registered.record.name, registered.record.audio_sha256) == (
                name.strip(),
                audio,
            )
            self.newest = registered.record.generation
            self.model[one_name(name)] = registered.record

    @rule(name=NAMES)
    def delete(self, name):
        assert self.registry.delete(name) == self.model.pop(one_name(name), None)

    @rule(name=NAMES)
    def get(self, name):
        assert self.registry.get(name) == self.model.get(one_name(name))

    @rule()
    def reopen(self):
        self.registry.close()
        self.registry = self.open_again()

    @invariant()
    def agrees(self):
        if hasattr(self, "model"):
            rows = sorted(self.model.values(), key=lambda record: record.name_key)
            assert self.registry.list(limit=9) == rows
            assert self.registry.count() == len(rows)
            for audio in "ab":
                used = [row for row in rows if row.audio_sha256 == audio]
                assert self.registry.references(audio) == len(used)

    def teardown(self):
        if hasattr(self, "registry"):
            assert self.registry.verify() == []
            self.registry.close()
            self.directory.cleanup()


TestRegistryModel = RegistryMachine.TestCase
TestRegistryModel.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
