"""Whatever a request says, and whatever the host raises of it, it fails by itself."""

import pytest
import torch

from tests.families.cases import cases, of
from tests.families.runner import as_the_runner_says

# The host asks Higgs Audio's talkers for no rows before a step; see their own tests.
WITHOUT_PREPROCESS = "higgs_audio_v3"
pytestmark = of(
    case
    for case in cases()
    if not case.family.pipelines and case.name != WITHOUT_PREPROCESS
)
# What the host's routes bring: ids alone, or what only an adapter should have said.
TOLD = [
    {},
    {"text": [""]},
    {"text": 5, "meta": 5},
    {"codes": 5, "hidden_states": [1], "embed": {"prefill": "x"}},
    {"tts_cache_speaker": "nobody"},
    {"tts_cache_speaker": ["a" * 64, "registered"], "task_type": 7},
]


@pytest.mark.parametrize("num_computed", [0, 4])
def test_a_prefill_never_raises(talker, num_computed):
    ids = torch.ones(8, dtype=torch.long)
    for told in TOLD:
        name = f"{told}{num_computed}"
        runners = as_the_runner_says(name, num_computed, 8 + num_computed)
        with torch.inference_mode():
            made, rows, update = talker.preprocess(ids, None, **told, **runners)
            again = talker.preprocess(ids, None, **{**told, **update, **runners})
        assert len(made) == len(rows) == len(again[1]) == 8, told


def test_a_step_that_decodes_never_raises(talker):
    ids = torch.ones(1, dtype=torch.long)
    runners = as_the_runner_says("decoding", 8, 8)
    with torch.inference_mode():
        _, rows, _ = talker.preprocess(ids, None, codes=5, meta=5, **runners)
    assert len(rows) == 1
