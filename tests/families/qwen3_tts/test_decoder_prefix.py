"""A request that begins behind its voice's state sounds as the host has it sound."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    configuration_qwen3_tts_tokenizer_v2 as configurations,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as host,
)

from vllm_tts_cache.families.qwen3_tts.decoder_prefix import DecoderPrefixes
from vllm_tts_cache.model_executor.decoder_states import DecoderStates

SMALL = {
    "codebook_size": 64,
    "hidden_size": 32,
    "latent_dim": 32,
    "codebook_dim": 32,
    "decoder_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
RELEASED = {"codebook_dim": 512}
WINDOW = 72
CHUNK = 25
VOICE = "a" * 64
# Of samples between -1 and 1: the same sums in another order.
TOLERANCE = 1e-4
# Where chunks end, after the first frame: the window rolls in the last ones.
ENDS = (1, 26, 51, 76, 101, 113)


def decoder_of(sizes, seed=0):
    torch.manual_seed(seed)
    config = configurations.Qwen3TTSTokenizerV2DecoderConfig(**sizes)
    decoder = host.Qwen3TTSTokenizerV2Decoder._from_config(config).eval()
    for name, weights in decoder.named_parameters():
        if "embedding_sum" in name:
            torch.nn.init.normal_(weights)
        elif name.endswith(("alpha", "beta")):
            torch.nn.init.normal_(weights, std=0.1)
        elif name.endswith("gamma"):  # else what it scales is hardly heard
            torch.nn.init.constant_(weights, 0.3)
        elif weights.dim() > 1:  # neither silent nor clipped
            torch.nn.init.normal_(weights, std=0.8 * weights[0].numel() ** -0.5)
    settings: Any = decoder
    settings._initial_codec_chunk_frames = 1
    settings._incremental_chunk_frames = CHUNK
    return decoder.requires_grad_(False)


def codes_of(num_frames, seed=1, num_codes=64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_codes, (16, num_frames), generator=generator)


def decoded(decoder, codes, state):
    """One chunk of one request. ``codes``: (16, num_frames)."""
    (samples,) = decoder.batched_chunked_decode(
        codes.unsqueeze(0), [codes.shape[1]], caches=[state]
    )
    return samples[0] if samples.dim() == 2 else samples


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
    counts = ours.states.stats()
    assert (counts["states"], counts["hits"], counts["made"]) == (1, 2, 3)
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
    assert least < ours.states.stats()["bytes"] < 2 * least


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
