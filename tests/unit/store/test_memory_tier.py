"""The memory tier, and against a model: per segment, keys ordered by last use."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.encoding_samples import INLINE, REGISTERED, make_key, sized_encoding
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.store.cache import Budget, MemoryTier

AUDIOS, ENCODERS = range(4), range(2)
SIZES = {make_key(a, e): 100 + 150 * a + 400 * e for a in AUDIOS for e in ENCODERS}
# Bytes and entries: of the smallest, more would fit than may be there.
LIMITS = {REGISTERED: (1500, 3), INLINE: (900, 2)}
segments = st.sampled_from(Segment)
keys = st.sampled_from(list(SIZES))
audios = st.sampled_from([make_key(audio).audio_sha256 for audio in AUDIOS])


class MemoryMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.tier = MemoryTier({s: Budget(*limits) for s, limits in LIMITS.items()})
        self.model = {segment: [] for segment in Segment}
        self.evictions = dict.fromkeys(Segment, 0)

    @rule(key=keys, segment=segments)
    def put(self, key, segment):
        since = self.tier.num_deletes
        self.tier.put(key, sized_encoding(SIZES[key]), segment, since=since)
        if self.holder(key) is None:
            self.add(key, segment)
        else:
            self.use(key, segment)

    @rule(key=keys, segment=segments)
    def get(self, key, segment):
        found = self.tier.get(key, segment)
        assert (found is not None) == (self.holder(key) is not None)
        if found is not None:
            self.use(key, segment)

    @rule()
    def delete_all(self):
        since = self.tier.num_deletes
        assert self.tier.delete_all() == sum(map(len, self.model.values()))
        self.model = {segment: [] for segment in Segment}
        for key in SIZES:  # read before, and put behind it
            self.tier.put(key, sized_encoding(SIZES[key]), REGISTERED, since=since)

    @rule(key=keys)
    def contains(self, key):
        assert self.tier.contains(key) == (self.holder(key) is not None)

    @rule(audio=audios)
    def delete(self, audio):
        num_held = sum(map(len, self.model.values()))
        for held in self.model.values():
            held[:] = [key for key in held if key.audio_sha256 != audio]
        num_gone = num_held - sum(map(len, self.model.values()))
        assert self.tier.delete(audio) == num_gone

    @invariant()
    def what_is_held_is_counted_right_and_within_budget(self):
        for segment, stats in self.tier.stats().segments.items():
            expected = self.model[segment]
            assert stats.entries == len(expected)
            assert stats.bytes == sum(SIZES[key] for key in expected)
            assert stats.evictions == self.evictions[segment]
            assert fits(segment, expected)

    def teardown(self):
        for audio in {key.audio_sha256 for key in SIZES}:
            self.tier.delete(audio)
        assert self.tier.stats().entries == self.tier.stats().bytes == 0

    # -------- the model

    def holder(self, key) -> Any:
        return next((s for s in Segment if key in self.model[s]), None)

    def use(self, key, segment):
        """What is used is used last; as registered it becomes so, if it fits."""
        holder = self.holder(key)
        self.model[holder].remove(key)
        is_promoted = (holder, segment) == (INLINE, REGISTERED)
        if is_promoted and fits(REGISTERED, [key]):
            self.add(key, REGISTERED)
        else:
            self.model[holder].append(key)

    def add(self, key, segment):
        if not fits(segment, [key]):
            return
        held = self.model[segment]
        held.append(key)
        while not fits(segment, held):
            del held[0]
            self.evictions[segment] += 1


def fits(segment, held):
    """Counted here: the budgets' own word is what is tested."""
    max_bytes, max_entries = LIMITS[segment]
    return len(held) <= max_entries and sum(SIZES[k] for k in held) <= max_bytes


TestMemoryTierAgainstModel = MemoryMachine.TestCase
TestMemoryTierAgainstModel.settings = settings(max_examples=100, stateful_step_count=40)


def test_counts_hold_when_threads_race():
    tier = MemoryTier({REGISTERED: Budget(500, 7), INLINE: Budget(300, 3)})

    def work(seed):
        for n in range(400):
            audio, segment = (seed * 7 + n) % 11, (REGISTERED, INLINE)[n % 2]
            since = tier.num_deletes
            encoding = sized_encoding(40 + audio)
            tier.put(make_key(audio, n % 2), encoding, segment, since=since)
            tier.get(make_key((audio + 3) % 11, n % 2), REGISTERED)
            if n % 13 == 0:
                tier.delete(make_key(audio).audio_sha256)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    stats = tier.stats()
    assert stats.hits + stats.misses == 1600
    audios = {make_key(audio, 0).audio_sha256 for audio in range(11)}
    assert stats.entries == sum(map(tier.delete, audios))
    assert tier.stats().bytes == 0


def test_what_may_have_been_deleted_long_ago_is_not_kept_either(monkeypatch):
    monkeypatch.setattr("vllm_tts_cache.store.cache._MAX_DELETED", 3)
    tier = MemoryTier(dict.fromkeys(Segment, Budget(1000)))
    since = tier.num_deletes
    for n in range(5):
        tier.delete(make_key(n).audio_sha256)
    tier.put(make_key(0), sized_encoding(1), REGISTERED, since=since)
    assert not tier.contains(make_key(0))
    tier.put(make_key(0), sized_encoding(1), REGISTERED, since=tier.num_deletes)
    assert tier.contains(make_key(0))
