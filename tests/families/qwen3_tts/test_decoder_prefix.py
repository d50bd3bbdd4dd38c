"""A request that begins behind its voice's state sounds as the host has it sound."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.families.qwen3_tts.decoders import (
    CHUNK,
    RELEASED,
    SMALL,
    WINDOW,
    codes_of,
    decoded,
    decoder_of,
)
from vllm_tts_cache.families.qwen3_tts.decoder_prefix import DecoderPrefixes
from vllm_tts_cache.model_executor.decoder_states import DecoderStates

VOICE = "a" * 64
# Of samples between -1 and 1: the same sums in another order.
TOLERANCE = 1e-4
# Where chunks end, after the first frame: the window rolls in the last ones.
ENDS = (1, 26, 51, 76, 101, 113)


def spoken(decoder, reference, codes, state=None):
    """All chunks of a request; without a state as the host begins it."""
    chunks = [codes[:, begin:end] for begin, end in pairwise((0, *ENDS))]
    if state is None:
        state = {"prefix_frames": reference.shape[1]}
        chunks[0] = torch.cat([reference, chunks[0]], dim=1)
    return torch.cat([decoded(decoder, chunk, state) for chunk in chunks])


@pytest.fixture(scope="module")
def stock():
    return decoder_of(SMALL)


@pytest.fixture
def ours():
    decoder, states = decoder_of(SMALL), DecoderStates(max_bytes=1 << 30)
    prefixes = DecoderPrefixes(decoder, states)
    return SimpleNamespace(decoder=decoder, states=states, begin=prefixes.begin)


@pytest.mark.parametrize("num_frames", [1, 2, 11, 12, 13, 71, 72])
def test_every_sample_is_the_hosts_within_rounding(stock, ours, num_frames):
    reference, codes = codes_of(num_frames), codes_of(ENDS[-1], seed=2)
    theirs = spoken(stock, reference, codes)
    state = ours.begin(reference, VOICE)
    mine = spoken(ours.decoder, reference, codes, state)
    assert mine.shape == theirs.shape == (1920 * ENDS[-1],)
    assert theirs.std() > 0.01
    assert (mine - theirs).abs().max() < TOLERANCE


def test_what_is_not_begun_by_us_is_the_hosts_to_the_bit(stock, ours):
    reference, codes = codes_of(WINDOW), codes_of(ENDS[-1], seed=2)
    spoken(ours.decoder, reference, codes, ours.begin(reference, VOICE))
    assert torch.equal(
        spoken(ours.decoder, reference, codes), spoken(stock, reference, codes)
    )
    nobody = codes_of(0)
    assert torch.equal(
        spoken(ours.decoder, nobody, codes), spoken(stock, nobody, codes)
    )


@pytest.mark.parametrize("num_frames", [5, WINDOW])
def test_a_hit_is_the_miss_to_the_bit_and_requests_share_a_state(ours, num_frames):
    reference = codes_of(num_frames)
    texts = [codes_of(ENDS[-1], seed) for seed in (2, 3)]
    alone = [
        spoken(ours.decoder, reference, codes, ours.begin(reference, None))
        for codes in texts
    ]
    states = [ours.begin(reference, VOICE) for _ in texts]
    chunks = [[], []]
    for begin, end in pairwise((0, *ENDS)):  # in turns
        for number, codes in enumerate(texts):
            chunk = decoded(ours.decoder, codes[:, begin:end], states[number])
            chunks[number].append(chunk)
    for mine, theirs in zip(alone, chunks, strict=True):
        assert torch.equal(mine, torch.cat(theirs))
    again = spoken(ours.decoder, reference, texts[0], ours.begin(reference, VOICE))
    assert torch.equal(again, alone[0])
    counts = ours.states.stats(0)
    assert (counts.states, counts.hits, counts.made) == (1, 2, 3)
    assert not torch.equal(alone[0], alone[1])


def test_first_chunks_of_any_length_go_on_as_the_hosts(stock, ours):
    reference, codes = codes_of(WINDOW), codes_of(40, seed=2)
    for first in (2, 8, CHUNK):
        state = ours.begin(reference, None)
        hosts = {"prefix_frames": WINDOW}
        begun = torch.cat([reference, codes[:, :first]], dim=1)
        pairs = [
            (
                decoded(ours.decoder, codes[:, :first], state),
                decoded(stock, begun, hosts),
            ),
            *(
                (decoded(ours.decoder, chunk, state), decoded(stock, chunk, hosts))
                for chunk in (codes[:, first : first + 7], codes[:, first + 7 :][:, :3])
            ),
        ]
        for mine, theirs in pairs:
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() < TOLERANCE


def test_neighbours_that_begin_together_have_their_own_voices(ours):
    voices = [codes_of(WINDOW, seed) for seed in range(3)]
    codes = codes_of(1, seed=9)
    states = [ours.begin(voice, None) for voice in voices]
    together = ours.decoder.batched_chunked_decode(
        codes.expand(3, -1, -1), [1] * 3, states
    )
    alone = [decoded(ours.decoder, codes, ours.begin(voice, None)) for voice in voices]
    for mine, theirs in zip(together, alone, strict=True):
        assert torch.equal(mine.reshape(-1), theirs)
    assert not torch.equal(alone[0], alone[1])


def test_what_is_counted_is_what_is_held(ours):
    ours.begin(codes_of(WINDOW), VOICE)
    # Keys and values of 71 frames; three times 72 frames; what convolutions read.
    least = 4 * (2 * 2 * 71 * 32 + 3 * WINDOW * 32)
    assert least < ours.states.stats(0).bytes < 2 * least


@pytest.mark.long
def test_every_sample_is_the_hosts_with_the_released_sizes():
    reference, codes = codes_of(WINDOW, 1, 2048), codes_of(3, 2, 2048)
    stock, ours = decoder_of(RELEASED), decoder_of(RELEASED)
    prefixes = DecoderPrefixes(ours, DecoderStates(max_bytes=0))
    state, hosts = prefixes.begin(reference, None), {"prefix_frames": WINDOW}
    begun = torch.cat([reference, codes[:, :1]], dim=1)
    pairs = [
        (decoded(ours, codes[:, :1], state), decoded(stock, begun, hosts)),
        (decoded(ours, codes[:, 1:], state), decoded(stock, codes[:, 1:], hosts)),
    ]
    for mine, theirs in pairs:
        assert theirs.std() > 0.01
        assert (mine - theirs).abs().max() < TOLERANCE
