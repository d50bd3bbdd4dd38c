"""A tier against a model: per segment, a list of keys ordered by last use."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.encoding_samples import INLINE, REGISTERED, make_key, sized_encoding
from vllm_tts_cache.store.keys import EncodingKey, Segment
from vllm_tts_cache.store.stats import Budget

AUDIOS, ENCODERS = range(4), range(2)
PAYLOADS = {
    make_key(audio, encoder): 100 + 150 * audio + 400 * encoder
    for audio in AUDIOS
    for encoder in ENCODERS
}
segments = st.sampled_from(Segment)
keys = st.sampled_from(list(PAYLOADS))
audios = st.sampled_from([make_key(audio).audio_sha256 for audio in AUDIOS])


class TierMachine(RuleBasedStateMachine):
    tier: Any
    budgets: dict[Segment, Budget]
    low_water = 1.0

    def __init__(self):
        super().__init__()
        self.model: dict[Segment, list[EncodingKey]] = {s: [] for s in Segment}

    def size(self, key: EncodingKey) -> int:
        return PAYLOADS[key]

    def settle(self, key: EncodingKey) -> None:
        """Called after each put."""

    @rule(key=keys, segment=segments)
    def put(self, key, segment):
        since = self.tier.num_forgets
        self.tier.put(key, sized_encoding(PAYLOADS[key]), segment, since=since)
        if (holder := self.holder(key)) is None:
            self.model_add(key, segment)
        elif (holder, segment) == (INLINE, REGISTERED):
            self.model_promote(key)
        elif self.touches_on_put:
            self.model_touch(key, holder)
        self.settle(key)

    touches_on_put = True

    @rule(key=keys, segment=segments)
    def get(self, key, segment):
        found = self.tier.get(key, segment)
        holder = self.holder(key)
        assert (found is not None) == (holder is not None)
        if holder is not None:
            self.model_touch(key, holder)
            if (holder, segment) == (INLINE, REGISTERED):
                self.model_promote(key)

    @rule(key=keys)
    def contains(self, key):
        holder = self.holder(key)
        assert self.tier.contains(key) == (holder is not None)
        if holder is not None and self.touches_on_contains:
            self.model_touch(key, holder)

    touches_on_contains = False

    @rule(key=keys)
    def promote(self, key):
        expected = self.holder(key) is INLINE and self.model_promote(key)
        assert self.tier.promote(key) == expected

    @rule(key=keys)
    def delete(self, key):
        holder = self.holder(key)
        assert self.tier.delete(key) == (holder is not None)
        if holder is not None:
            self.model[holder].remove(key)

    @rule(audio=audios)
    def forget(self, audio):
        gone = [
            k for keys in self.model.values() for k in keys if k.audio_sha256 == audio
        ]
        assert self.tier.forget(audio) == len(gone)
        for key in gone:
            for held in self.model.values():
                held[:] = [other for other in held if other != key]

    @invariant()
    def what_is_held_is_counted_right_and_within_budget(self):
        for segment, stats in self.tier.stats().segments.items():
            expected = self.model[segment]
            assert stats.entries == len(expected)
            assert stats.bytes == sum(map(self.size, expected))
            assert self.budgets[segment].allows(stats.bytes, stats.entries)

    def holder(self, key: EncodingKey) -> Segment | None:
        return next((s for s in Segment if key in self.model[s]), None)

    def model_touch(self, key, segment):
        self.model[segment].remove(key)
        self.model[segment].append(key)

    def model_promote(self, key) -> bool:
        if not self.budgets[REGISTERED].allows(self.size(key), 1):
            return False
        self.model[INLINE].remove(key)
        self.model_add(key, REGISTERED)
        return True

    def model_add(self, key, segment):
        if not self.fits(self.budgets[segment], [key]):
            return
        held = self.model[segment]
        held.append(key)
        if self.fits(self.budgets[segment], held):
            return
        for oldest in held[:-1]:
            if self.fits(self.budgets[segment], held, self.low_water):
                return
            held.remove(oldest)

    def fits(self, budget, held, share=1.0) -> bool:
        limit = budget.max_entries
        if limit is not None and len(held) > int(limit * share):
            return False
        return sum(map(self.size, held)) <= int(budget.max_bytes * share)
