"""Many voices in a decoder that has room for two, deleted while they speak."""

import random

import pytest
import torch

from tests.families.qwen3_tts.decoders import (
    CHUNK,
    SMALL,
    WINDOW,
    codes_of,
    decoded,
    decoder_of,
)
from vllm_tts_cache.families.qwen3_tts.decoder_prefix import DecoderPrefixes
from vllm_tts_cache.model_executor.decoder_states import DecoderStates

NUM_VOICES, NUM_STEPS = 6, 40
SPOKEN = (codes_of(1, 99), codes_of(CHUNK, 98))


class Stage:
    """A decoder with room for two states, and what it was told."""

    def __init__(self):
        probe = DecoderStates(max_bytes=1 << 30)
        DecoderPrefixes(decoder_of(SMALL), probe).begin(codes_of(WINDOW), sha(0))
        self.states = DecoderStates(max_bytes=2 * probe.stats(0).bytes + 1)
        self.decoder = decoder_of(SMALL)
        self.prefixes = DecoderPrefixes(self.decoder, self.states)
        self.deleted: set[int] = set()

    def begin(self, voice):
        """A request's state after its first frame, and the samples of that frame."""
        state = self.prefixes.begin(codes_of(WINDOW, voice), sha(voice))
        assert state is not None
        self.check()
        return state, decoded(self.decoder, SPOKEN[0], state)

    def delete(self, voice):
        self.states.delete([sha(voice)])
        self.deleted.add(voice)
        self.check()

    def check(self):
        """At any time: within its bounds, counted rightly, and of nobody deleted."""
        told, kept = self.states.stats(0), self.states._states.entries
        assert told.bytes == sum(state.num_bytes for state in kept.values())
        assert told.bytes <= told.max_bytes and told.states == len(kept) <= 2
        assert not {address for address, _ in kept} & set(map(sha, self.deleted))


def sha(voice):
    return f"{voice:064x}"


@pytest.mark.parametrize("seed", range(3))
def test_voices_that_come_and_go_while_they_speak(seed):
    chance, stage, speaking = random.Random(seed), Stage(), []
    heard: dict[tuple[int, int], torch.Tensor] = {}

    def hear(voice, part, samples):
        """Every request of a voice sounds alike, whatever happened to others."""
        assert torch.equal(samples, heard.setdefault((voice, part), samples))

    for _ in range(NUM_STEPS):
        voice = chance.randrange(NUM_VOICES)
        state, samples = stage.begin(voice)
        hear(voice, 0, samples)
        speaking.append((voice, state))
        if chance.random() < 0.3:
            stage.delete(chance.randrange(NUM_VOICES))
        if len(speaking) > 3:  # one goes on, whose voice may be deleted by now
            voice, state = speaking.pop(chance.randrange(len(speaking)))
            hear(voice, 1, decoded(stage.decoder, SPOKEN[1], state))
            stage.check()
    for voice in range(NUM_VOICES):
        stage.delete(voice)
    for voice, state in speaking:
        hear(voice, 1, decoded(stage.decoder, SPOKEN[1], state))
    told = stage.states.stats(0)
    assert (told.states, told.bytes) == (0, 0)
    assert told.evictions and told.hits and told.made
