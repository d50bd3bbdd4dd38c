"""A request that begins behind its voice's state sounds as the host has it sound."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

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
RELEASED_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}
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


def begun_together(decoder, codes, states, **settings):
    """First chunks of several requests at once, and the sizes of their batches."""
    sizes = []
    hook = decoder.pre_transformer.register_forward_pre_hook(
        lambda _module, _, given: sizes.append(given["inputs_embeds"].shape[0]),
        with_kwargs=True,
    )
    lengths = [each.shape[1] for each in codes]
    padded = [functional.pad(each, (0, max(lengths) - each.shape[1])) for each in codes]
    samples = decoder.batched_chunked_decode(
        torch.stack(padded), lengths, caches=states, **settings
    )
    hook.remove()
    return [each.reshape(-1) for each in samples], sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neighbours_that_begin_together_are_one_batch_as_x_vectors_are(ours, dtype):
    """What the host batches differs by as much: sums of several rows are others."""
    decoder = ours.decoder.to(dtype)
    voices = [codes_of(num_frames, num_frames) for num_frames in (WINDOW, 5, 71)]
    codes = [codes_of(1, seed=9)] * 3
    farthest = {}
    for how, begin in {
        "ours": lambda voice: ours.begin(voice, None),
        "x-vector": lambda _: {"prefix_frames": 0},
    }.items():
        together, sizes = begun_together(decoder, codes, [begin(v) for v in voices])
        assert sizes == [3]
        alone = [decoded(decoder, codes[0], begin(voice)) for voice in voices]
        assert torch.equal(alone[0], alone[1]) == (how == "x-vector")
        farthest[how] = max(
            float((mine - theirs).abs().max())
            for mine, theirs in zip(together, alone, strict=True)
        )
    assert farthest["ours"] <= 10 * farthest["x-vector"] <= TOLERANCE


def test_batches_are_of_equal_lengths_and_no_larger_than_the_host_lets_them(ours):
    lengths = [1, 1, 2, 1, 1]
    codes = [codes_of(length, 9) for length in lengths]
    voices = [codes_of(WINDOW, seed) for seed in range(5)]
    states = [ours.begin(voice, None) for voice in voices]
    states[3] = {"prefix_frames": 0}  # a preset among them, which the host decodes
    together, sizes = begun_together(ours.decoder, codes, states, max_batch_size=2)
    assert sizes == [2, 1, 1, 1]
    for number, samples in enumerate(together):
        begin = (
            ours.begin(voices[number], None) if number != 3 else {"prefix_frames": 0}
        )
        alone = decoded(ours.decoder, codes[number], begin)
        assert samples.shape == alone.shape
        assert (samples - alone).abs().max() < TOLERANCE


def test_those_that_began_together_go_on_as_the_hosts(stock, ours):
    voices, texts = (
        [codes_of(WINDOW, 1), codes_of(5, 2)],
        [codes_of(101, 3), codes_of(101, 4)],
    )
    states = [ours.begin(voice, None) for voice in voices]
    chunks, _ = begun_together(ours.decoder, [text[:, :1] for text in texts], states)
    mine = [[chunk] for chunk in chunks]
    for begin, end in pairwise((1, 26, 51, 76, 101)):
        parts = [text[:, begin:end] for text in texts]
        chunks, _ = begun_together(ours.decoder, parts, states)
        for whole, chunk in zip(mine, chunks, strict=True):
            whole.append(chunk)
    for voice, text, chunks in zip(voices, texts, mine, strict=True):
        hosts = {"prefix_frames": voice.shape[1]}
        begun = decoded(stock, torch.cat([voice, text[:, :1]], dim=1), hosts)
        theirs = [
            begun,
            *(decoded(stock, part, hosts) for part in text[:, 1:].split(CHUNK, 1)),
        ]
        assert (torch.cat(chunks) - torch.cat(theirs)).abs().max() < TOLERANCE


def test_codes_in_main_memory_go_to_the_decoders_device(monkeypatch):
    """Where the connector may leave them, although the decoder is on a card."""
    decoder = decoder_of(SMALL).to("meta")
    seen = []

    def decode(codes):
        seen.append(codes.device.type)
        raise LookupError  # the host's rotary embedding computes on real devices only

    monkeypatch.setattr(decoder.quantizer, "decode", decode)
    with pytest.raises(LookupError):
        DecoderPrefixes(decoder, DecoderStates(max_bytes=0)).begin(codes_of(1), None)
    assert seen == ["meta"]


def test_what_is_counted_is_what_is_held(ours):
    ours.begin(codes_of(WINDOW), VOICE)
    # Keys and values of 71 frames; three times 72 frames; what convolutions read.
    least = 4 * (2 * 2 * 71 * 32 + 3 * WINDOW * 32)
    assert least < ours.states.stats(0).bytes < 2 * least


def test_of_a_longer_reference_no_more_is_held_than_is_counted(ours):
    """The host's keys and values are views of those of all its frames."""
    state = ours.begin(codes_of(3 * WINDOW), VOICE)
    for layer in state["past_key_values"].layers:
        for kept in (layer.keys, layer.values):
            held = kept.untyped_storage().nbytes()
            assert held == kept.numel() * kept.element_size()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_sample_is_the_hosts_with_the_released_sizes(dtype):
    num_frames = 1 + CHUNK
    reference, codes = codes_of(WINDOW, 1, 2048), codes_of(num_frames, 2, 2048)
    stock, ours = (decoder_of(RELEASED).to(dtype) for _ in range(2))
    state = DecoderPrefixes(ours, DecoderStates(max_bytes=0)).begin(reference, None)
    hosts, begin = {"prefix_frames": WINDOW}, 0
    for end in (1, num_frames):
        chunk = codes[:, begin:end]
        begun = chunk if begin else torch.cat([reference, chunk], dim=1)
        mine, theirs = decoded(ours, chunk, state or {}), decoded(stock, begun, hosts)
        assert theirs.std() > 0.01
        assert (mine - theirs).abs().max() < RELEASED_TOLERANCE[dtype]
        begin = end
