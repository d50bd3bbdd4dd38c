"""What a talker that resumes costs: nothing, in the host's own scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.test_reservation import Player
from tests.real_scheduler import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    new_request,
    unhooked_scheduler,
)
from vllm_tts_cache.model_executor.kv_room import _Replay, resume_by_replay

AMPLE = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE + 1


def replay():
    managers = [SimpleNamespace(block_size=8)]
    coordinator = SimpleNamespace(single_type_managers=managers)
    manager = SimpleNamespace(get_computed_blocks=None, coordinator=coordinator)
    scheduler: Any = SimpleNamespace(
        kv_cache_manager=manager,
        _reserve_prefill_lookahead=lambda _request, _computed, wanted: wanted,
        _preempt_request=None,
    )
    return _Replay(scheduler)


@given(
    num_prompt=st.integers(1, 40),
    num_spoken=st.integers(1, 40),
    found=st.integers(0, 40),
    budgets=st.lists(st.integers(1, 30), min_size=1, max_size=8),
)
def test_the_last_token_is_computed_alone(num_prompt, num_spoken, found, budgets):
    request: Any = SimpleNamespace(
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_spoken,
        num_tokens=num_prompt + num_spoken,
    )
    last, computed, spans = request.num_tokens - 1, min(found, num_prompt - 1), []
    step_of = replay().num_new_tokens
    for number in range(1_000):
        # The last of them again and again: by then others have ended.
        budget = budgets[number] if number < len(budgets) else 30
        wanted = min(budget, request.num_tokens - computed)
        new = step_of(request, computed, wanted)
        assert 0 <= new <= wanted
        if new:
            spans.append((computed, computed + new))
            computed += new
        if computed == request.num_tokens:
            break
    assert spans[-1] == (last, request.num_tokens)
    for begin, end in spans[:-1]:
        assert end <= last
        assert begin < num_prompt or end - begin > 1


def played(scheduler, requests):
    """Each step's tokens by request, until all have ended."""
    player, steps = Player(scheduler), []
    for request in requests:
        request.external_req_id = request.request_id
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        steps.append(dict(player.step().num_scheduled_tokens))
    return steps, player


def some_requests():
    return [
        new_request(f"{n}", 60 + 7 * n, 80, cache_salt=f"{n % 2}") for n in range(9)
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_nobody_is_preempted_nothing_is_changed(stage_config, asynchronous):
    schedules = []
    for hook in (lambda _: None, resume_by_replay):
        how = {"num_blocks": AMPLE, "asynchronous": asynchronous}
        scheduler = unhooked_scheduler(stage_config, **how)
        hook(scheduler)
        schedules.append(played(scheduler, some_requests())[0])
    assert schedules[0] == schedules[1]


def test_only_the_prompts_part_of_the_prefix_cache_is_taken(stage_config):
    scheduler = unhooked_scheduler(stage_config, num_blocks=AMPLE)
    resume_by_replay(scheduler)
    prompt = [5] * (3 * BLOCK_SIZE)
    played(scheduler, [new_request("first", prompt, 4 * BLOCK_SIZE)])
    found = scheduler.kv_cache_manager.get_computed_blocks
    again = new_request("again", prompt, 9)
    assert found(again)[1] == 2 * BLOCK_SIZE  # the last is computed for its logits
    again.append_output_token_ids([8] * (2 * BLOCK_SIZE))
    blocks, num_tokens, _ = found(again)
    assert num_tokens == 2 * BLOCK_SIZE
    assert [len(group) for group in blocks.blocks] == [2]
