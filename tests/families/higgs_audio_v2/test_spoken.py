"""Whoever comes and goes, a request goes on from what it has spoken itself.

Rows of the batch move: when a request ends, the last one takes its row, and a newcomer
takes the next that is free. Beside stock, which takes a row for a request.
"""

import pytest
import torch

from tests.families.higgs_audio_v2.voices import rows_of
from tests.sampling import greedy

BEGIN, AUDIO, WORD = 128_013, 128_016, 300
BOS = 1024  # of a codebook that has not begun
NUM_PROMPT = 5


@pytest.fixture
def batch(talker):
    batch = Batch(talker)
    yield batch
    batch.end(*batch.frames)
    assert talker._spoken._of_requests == {}


class Batch:
    """Requests of a talker, ours or the host's, of which each step names the rows."""

    def __init__(self, talker):
        self._talker = talker
        self.frames = {}
        torch.manual_seed(0)

    def step(self, *request_ids):
        """Compute a step; returns what the layers are given for each request's last id.

        One that is new prefills, and each that speaks has its frame in ``frames``.
        """
        talker, known = self._talker, [each in self.frames for each in request_ids]
        prompt = torch.tensor([WORD] * (NUM_PROMPT - 1) + [BEGIN])
        spans = [torch.tensor([AUDIO]) if each else prompt for each in known]
        begins = [NUM_PROMPT if each else 0 for each in known]
        rows = rows_of(talker, spans, begins, [{}] * len(spans), request_ids)
        # The host's own way to a row's last id needs the attention's metadata.
        talker._last_step_input_ids = torch.stack([span[-1] for span in spans])
        hidden = torch.randn(len(spans), talker.config.hidden_size).bfloat16()
        with torch.inference_mode():
            talker.sample(talker.compute_logits(hidden), greedy(len(spans)))
            for request_id in request_ids:
                (frame,) = talker.postprocess(hidden)["codes"]["audio"]
                self.frames.setdefault(request_id, []).append(frame)
        return [of_one[-1] for of_one in rows]

    def end(self, *request_ids):
        """Requests are over; the runner says so before the step that moves rows."""
        if (over := getattr(self._talker, "on_requests_finished", None)) is not None:
            over(set(request_ids))
        for request_id in request_ids:
            del self.frames[request_id]

    def last(self, request_id):
        """The row that a request's last frame makes."""
        with torch.inference_mode():
            frame = self.frames[request_id][-1].long().unsqueeze(-1)
            return self._talker.embed_audio_codes(frame)[0]


def num_begun(frame):
    """How many codebooks have begun: one more with each frame."""
    return int((frame != BOS).sum())


@pytest.mark.parametrize("num_steps", [0, 3], ids=["as long", "longer"])
def test_one_that_moves_goes_on_from_its_own(batch, num_steps):
    for _ in range(num_steps):
        batch.step("c")
    for _ in range(4):
        batch.step("a", "b", "c")
    lasts = {name: batch.last(name) for name in "abc"}
    batch.end("a")
    c, b = batch.step("c", "b")  # with which it moves into the row of the first
    assert torch.equal(c, lasts["c"]) and torch.equal(b, lasts["b"])
    assert not torch.equal(lasts["a"], lasts["c"])
    begun = [num_begun(frame) for frame in batch.frames["c"]]
    assert begun == [min(step, 8) for step in range(num_steps + 5)]


def test_one_that_sat_a_step_out_goes_on_from_its_own(batch):
    for _ in range(4):
        batch.step("a", "b")
    last = batch.last("a")
    batch.step("b")
    b, a = batch.step("b", "a")
    assert torch.equal(a, last)
    assert num_begun(batch.frames["a"][-1]) == 4
    assert not torch.equal(a, b)


def test_beside_a_prefill_it_goes_on_from_its_own(batch):
    for _ in range(4):
        batch.step("a", "b")
    last = batch.last("b")
    batch.end("a")
    _, b = batch.step("newcomer", "b")  # which takes the row before it
    assert torch.equal(b, last)


def test_a_chunk_of_a_reference_is_not_taken_for_a_step_of_another(batch, talker):
    """The host takes a chunk's first places for rows of the batch."""
    for _ in range(4):
        batch.step("a", "b", "c")
    span = torch.full((6,), AUDIO)
    (rows,) = rows_of(talker, [span], [0], [{}], ["newcomer"])
    assert torch.equal(rows, talker.embed_tokens(span))
