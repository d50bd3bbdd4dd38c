"""What Audio8 TTS has of its own: that nothing is encoded, and two samplers."""

from dataclasses import replace

import torch

from tests.families.audio8_tts.voices import FIRST, LAST, Bench
from tests.families.runner import UNKNOWN
from tests.sampling import greedy
from vllm_tts_cache.families.audio8_tts.family import FAMILY


def test_both_samplers_of_the_host_have_the_id_that_ends_it(talker, own_checkpoint):
    bench = Bench(talker, own_checkpoint)
    voice, expected = bench.voice(), [FAMILY.failure_id, FIRST + 5]
    bench.rows([("failing", voice, 0, len(voice.ids), {**voice.info, **UNKNOWN})])
    talker.set_batch_req_ids(["failing", "r"])
    logits = torch.full((2, LAST + 1), float("-inf"))
    logits[:, FIRST + 5] = 0.0
    sampled = talker.sample(logits.clone(), greedy(2)).sampled_token_ids
    assert sampled.flatten().tolist() == expected
    assert talker.sample(logits, replace(greedy(2), no_penalties=False)) is None
    assert logits.argmax(dim=-1).tolist() == expected
