"""What Audio8 TTS has of its own: that nothing is encoded, and two samplers.

The rows of a reference are compared with the host's in the shared tests of those.
"""

from dataclasses import replace

import pytest
import torch

from tests.families.audio8_tts.voices import FIRST, LAST, Bench
from tests.families.runner import UNKNOWN
from tests.sampling import greedy
from vllm_tts_cache.families.audio8_tts.family import FAMILY


@pytest.fixture
def bench(talker, own_checkpoint):
    talker._failed_requests._ids.clear()
    return Bench(talker, own_checkpoint)


def metadata(**changed):
    return replace(greedy(2), **changed)


def test_the_hosts_sampler_and_vllms_own_are_left_the_id_that_ends_it(talker, bench):
    voice, expected = bench.voice(), [FAMILY.failure_id, FIRST + 5]
    bench.rows([("failing", voice, 0, len(voice.ids), {**voice.info, **UNKNOWN})])
    talker.set_batch_req_ids(["failing", "r"])
    logits = torch.full((2, LAST + 1), float("-inf"))
    logits[:, FIRST + 5] = 0.0
    sampled = talker.sample(logits.clone(), metadata()).sampled_token_ids
    assert sampled.flatten().tolist() == expected
    assert talker.sample(logits, metadata(no_penalties=False)) is None
    assert logits.argmax(dim=-1).tolist() == expected
