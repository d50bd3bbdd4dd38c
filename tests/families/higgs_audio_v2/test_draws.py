"""A request's codes are drawn by its own generator, and as the host draws them."""

import pytest
import torch

from tests.families.higgs_audio_v2.voices import as_stock, rows_of
from tests.sampling import drawing, greedy
from vllm_tts_cache.families.higgs_audio_v2 import draws as ours
from vllm_tts_cache.speaker.reference import FIELD

BEGIN, AUDIO = 128_013, 128_016
NUM_FRAMES = 20
# So loud that a few codes are likely, and so few that they come again: those the host
# draws anew.
GAIN, NUM_HIDDEN = 3.0, 3


@pytest.fixture(autouse=True)
def nothing_is_left(talker):
    yield
    talker.on_requests_finished({"alone", "again", "late", "newcomer", "cut"})


def hidden_of(talker, number):
    """What the layers make of any request in this step of it, whoever is beside it."""
    generator = torch.Generator().manual_seed(number % NUM_HIDDEN)
    return GAIN * torch.randn(talker.config.hidden_size, generator=generator)


def step(talker, request_ids, numbers, sampling, infos=None):
    """Compute a step; returns a frame for each request, None if it has none.

    ``numbers``: the how manieth step of each it is; the first ends its prefill.
    """
    spans = [torch.tensor([AUDIO if number else BEGIN]) for number in numbers]
    rows_of(talker, spans, numbers, infos or [{}] * len(spans), request_ids)
    hidden = torch.stack([hidden_of(talker, each) for each in numbers]).bfloat16()
    with torch.inference_mode():
        talker.sample(talker.compute_logits(hidden), sampling)
        made = [talker.postprocess(hidden) for _ in request_ids]
    return [each["codes"]["audio"][0] if each else None for each in made]


def spoken(talker, request_id, seed, *, neighbours=()):
    """All frames of a new request; without a seed by the process's generator.

    ``neighbours``: those beside it in its row-th step, in the rows before it.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    begun, frames = {}, []
    for number in range(NUM_FRAMES):
        beside = list(neighbours[number]) if number < len(neighbours) else []
        ids, row = [*beside, request_id], len(beside)
        since = [number - begun.setdefault(each, number) for each in ids]
        sampling = greedy(len(ids))
        sampling.generators = {} if generator is None else {row: generator}
        frames.append(step(talker, ids, since, sampling)[row])
    return torch.stack(frames)


def test_a_lone_request_speaks_as_on_the_host(talker):
    torch.manual_seed(5)
    stock = spoken(as_stock(talker), "alone", None)
    torch.manual_seed(6)
    assert torch.equal(spoken(talker, "alone", seed=5), stock)
    assert not torch.equal(spoken(talker, "again", seed=6), stock)


def test_what_is_drawn_for_a_request_depends_on_no_neighbour(talker):
    alone = spoken(talker, "alone", seed=5)
    beside = [("late",), ("late",), (), ("newcomer", "late"), *[("newcomer",)] * 9]
    before = torch.get_rng_state()
    assert torch.equal(spoken(talker, "again", seed=5, neighbours=beside), alone)
    assert not torch.equal(torch.get_rng_state(), before), "the others have no seed"


def test_a_chunk_that_ends_in_its_reference_uses_up_none_of_its_generator(talker):
    """The runner takes back what it drew of an id there, and knows of no codes."""
    generator = torch.Generator().manual_seed(5)
    sampling = greedy(1)
    sampling.generators = {0: generator}
    before = generator.get_state()
    talker._failed_requests._ids["cut"] = None  # it is asked for no codes
    info = {FIELD: ["0" * 64, "registered"], "generated_len": 0}
    (frame,) = step(talker, ["cut"], [1], sampling, [info])
    assert frame is not None, "the host draws a frame there"
    assert torch.equal(generator.get_state(), before)
    info["generated_len"] = 1
    step(talker, ["cut"], [1], sampling, [info])
    assert not torch.equal(generator.get_state(), before)


def test_equal_requests_of_a_step_draw_alike(talker):
    generators = {row: torch.Generator().manual_seed(7) for row in range(2)}
    ids = ["alone", "again"]
    for number in range(NUM_FRAMES):
        sampling = drawing(2, generators)
        one, other = step(talker, ids, [number, number], sampling)
        assert one is not None and other is not None and torch.equal(one, other)


def test_a_draw_without_some_codebooks_is_left_to_the_host():
    """It leaves out those whose probabilities are none; ours would end the engine."""
    row = ours.SpeakingRow(generator=None, spoken=torch.ones(8, 9, dtype=torch.long))
    step = ours.Draws([row], num_codebooks=8)
    assert step.draw(torch.rand(7, 5)) is None
    assert step.draw(torch.rand(1, 5)) is None
