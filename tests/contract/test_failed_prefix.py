"""What a failed request left in the prefix cache serves nobody: the real scheduler."""

from contextlib import contextmanager
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

from tests.families.cases import cases, default_case
from tests.real_scheduler import BLOCK_SIZE, new_request, new_scheduler
from vllm_tts_cache.model_executor import failed_requests as ours
from vllm_tts_cache.speaker.reference import FIELD

NUM_TOKENS = 5 * BLOCK_SIZE + 3
PROMPT = [11] * NUM_TOKENS
OTHER_TOKEN = 8
NO_SPEAKER_PROMPT: Any = default_case().family.failure_id


@pytest.fixture
def scheduler(stage_config):
    with hooked():
        yield new_scheduler(stage_config)


@contextmanager
def hooked():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__init__", "_update_request_with_output"):
            patch.setattr(OmniARScheduler, name, getattr(OmniARScheduler, name))
        ours.install()
        yield


def clone(name, salt="voice"):
    request: Any = new_request(name, PROMPT, 4, cache_salt=salt)
    request.additional_information = {FIELD: ["0" * 64, "registered"]}
    return request


def step(scheduler, token, **of_some):
    """Have all sample ``token`` but those named otherwise; what clients are told."""
    scheduled = scheduler.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: i for i, name in enumerate(ids)},
        sampled_token_ids=[[of_some.get(name, token)] for name in ids],
    )
    told = scheduler.update_from_output(scheduled, output)
    outputs = [o for each in told.values() for o in each.outputs]
    return scheduled, {o.request_id: o.finish_reason for o in outputs}


def num_cached(scheduled, name):
    (new,) = [r for r in scheduled.scheduled_new_reqs if r.req_id == name]
    return new.num_computed_tokens


def test_the_next_request_of_the_voice_computes_its_prefix_again(scheduler):
    scheduler.add_request(clone("failed"))
    _, told = step(scheduler, NO_SPEAKER_PROMPT)
    assert told == {"failed": FinishReason.ERROR}
    scheduler.add_request(clone("next"))
    scheduled, _ = step(scheduler, OTHER_TOKEN)
    assert num_cached(scheduled, "next") == 0


def test_another_voice_keeps_its_prefix(scheduler):
    scheduler.add_request(clone("other", salt="another voice"))
    step(scheduler, OTHER_TOKEN)
    scheduler.add_request(clone("failed"))
    step(scheduler, OTHER_TOKEN, failed=NO_SPEAKER_PROMPT)
    scheduler.add_request(clone("next", salt="another voice"))
    scheduled, _ = step(scheduler, OTHER_TOKEN)
    assert num_cached(scheduled, "next") == 5 * BLOCK_SIZE


@pytest.mark.parametrize(
    "case", [each for each in cases() if each.family.models], ids=lambda case: case.name
)
def test_one_that_names_nobody_fails_by_that_id_as_well(case, stage_config):
    """As by a route of the host; else it would sample that id until its last token."""
    (architecture, *_) = case.family.models
    with hooked():
        scheduler = new_scheduler(stage_config, architecture=architecture)
        scheduler.add_request(new_request("nobody", PROMPT, 4))
        _, told = step(scheduler, case.family.failure_id)
    assert told == {"nobody": FinishReason.ERROR}
