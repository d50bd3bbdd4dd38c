"""What a talker that resumes costs: nothing, in the host's own scheduler.

That it says what it would have said is its family's to show, beside its worker.
"""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.contract.test_reservation import Player
from tests.families.cases import default_case
from tests.real_scheduler import (
    ATTENTION,
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    STOP,
    new_request,
    new_scheduler,
    stage_config_of,
)
from vllm_tts_cache.model_executor.kv_room import (
    _Replay,
    reserve_blocks,
    resume_by_replay,
)

AMPLE = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE + 1


@pytest.fixture(scope="module")
def stage_config(default_checkpoint):
    return stage_config_of(default_case(), default_checkpoint)


def unhooked(*args, **kwargs):
    return new_scheduler(*args, **kwargs, hooked=False)


# How what was spoken is cut into steps


def replay_of(hosts=lambda _request, _computed, wanted: wanted):
    manager = SimpleNamespace(
        get_computed_blocks=None,
        coordinator=SimpleNamespace(
            single_type_managers=[SimpleNamespace(block_size=8)]
        ),
    )
    scheduler: Any = SimpleNamespace(
        kv_cache_manager=manager,
        _reserve_prefill_lookahead=hosts,
        _preempt_request=None,
    )
    return _Replay(scheduler)


@given(
    num_prompt=st.integers(1, 40),
    num_spoken=st.integers(1, 40),
    found=st.integers(0, 40),
    budgets=st.lists(st.integers(1, 30), min_size=1, max_size=8),
)
def test_what_was_spoken_is_computed_in_steps_of_several_and_the_last_token_alone(
    num_prompt, num_spoken, found, budgets
):
    request: Any = SimpleNamespace(
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_spoken,
        num_tokens=num_prompt + num_spoken,
    )
    last, computed, spans = request.num_tokens - 1, min(found, num_prompt - 1), []
    replay = replay_of()
    for number in range(1_000):
        # The last of them again and again: by then others have ended.
        budget = budgets[number] if number < len(budgets) else 30
        wanted = min(budget, request.num_tokens - computed)
        new = replay.num_new_tokens(request, computed, wanted)
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


def test_a_request_that_has_said_nothing_and_a_decode_step_are_the_hosts():
    replay = replay_of(lambda _request, _computed, wanted: wanted - 1)
    for spoken, computed in ((0, 0), (0, 39), (3, 42)):
        request: Any = SimpleNamespace(
            num_prompt_tokens=40, num_output_tokens=spoken, num_tokens=40 + spoken
        )
        assert replay.num_new_tokens(request, computed, 20) == 19


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
        scheduler = unhooked(stage_config, num_blocks=AMPLE, asynchronous=asynchronous)
        hook(scheduler)
        schedules.append(played(scheduler, some_requests())[0])
    assert schedules[0] == schedules[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_preempted_request_ends(stage_config, asynchronous):
    scheduler = unhooked(stage_config, num_blocks=20, asynchronous=asynchronous)
    resume_by_replay(scheduler)
    requests = some_requests()
    _, player = played(scheduler, requests)
    assert len(player.preempted) > 3
    assert {len(r.output_token_ids) for r in requests} == {80}


def test_only_the_prompts_part_of_the_prefix_cache_is_taken(stage_config):
    scheduler = unhooked(stage_config, num_blocks=AMPLE)
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


# What it admits on a GPU: the arithmetic of Fish Speech S2 Pro

GIB = 2**30
# Per token: key and value of 36 layers with 8 heads of 128, 2 bytes each.
KV_BYTES = 2 * 36 * 8 * 128 * 2
# In bfloat16, both token tables of the slow AR apart; our encoder in float32; and what
# a step of 16,384 tokens takes.
WEIGHTS_GIB, ENCODER_GIB, ACTIVATIONS_GIB = 9.23, 0.69, 1.4
PROMPT, SPOKEN, MAX_TOKENS = 900, 250, 2_048
GPU_BLOCK, GPU_MODEL_LEN = 16, 16_384
GPU_SPEC = FullAttentionSpec(block_size=GPU_BLOCK, **ATTENTION)


def num_gpu_blocks(total_gib, utilization):
    free = total_gib * utilization - WEIGHTS_GIB - ENCODER_GIB - ACTIVATIONS_GIB
    return int(free * GIB / KV_BYTES / GPU_BLOCK)


def at_once(stage_config, hook, num_blocks, max_num_seqs):
    """How many speak at once while others wait, on average; the steps for all."""
    config = deepcopy(stage_config)
    config.model_config.max_model_len = GPU_MODEL_LEN
    config.scheduler_config.max_model_len = GPU_MODEL_LEN
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.scheduler_config.max_num_batched_tokens = GPU_MODEL_LEN
    scheduler = unhooked(
        config, num_blocks=num_blocks, block_size=GPU_BLOCK, groups=(GPU_SPEC,)
    )
    hook(scheduler)
    player = SpeaksSoLong(scheduler)
    for number in range(2 * max_num_seqs):
        request = new_request(f"{number}", PROMPT, MAX_TOKENS, block_size=GPU_BLOCK)
        scheduler.add_request(request)
    running, num_steps = [], 0
    while scheduler.has_unfinished_requests():
        player.step()
        num_steps += 1
        if len(scheduler.waiting):  # else it is not the cache that decides
            running.append(len(scheduler.running))
    return sum(running) / len(running), num_steps


@pytest.mark.parametrize(
    ("total_gib", "utilization", "max_num_seqs", "reserving", "resuming"),
    [
        (23.5, 0.60, 4, 4, 4),
        (23.5, 0.72, 64, 13, 35),
        (44.4, 0.72, 64, 50, 64),
        (79.1, 0.72, 64, 64, 64),
    ],
    ids=["24-GB-default", "24-GB", "48-GB", "80-GB"],
)
def test_as_many_speak_at_once_as_in_stock(
    stage_config, total_gib, utilization, max_num_seqs, reserving, resuming
):
    """Prompts of 900 tokens that speak 250 of the 2,048 that they might."""
    num_blocks = num_gpu_blocks(total_gib, utilization)
    used = -(-(PROMPT + SPOKEN) // GPU_BLOCK)
    assert min(max_num_seqs, num_blocks // used) == resuming
    held = -(-(PROMPT + MAX_TOKENS + 1) // GPU_BLOCK)
    assert min(max_num_seqs, num_blocks // held) == reserving

    def run(hook):
        return at_once(stage_config, hook, num_blocks, max_num_seqs)

    stock, stock_steps = run(lambda _: None)
    ours, our_steps = run(resume_by_replay)
    assert ours >= 0.99 * stock > 0.97 * resuming
    assert our_steps <= 1.01 * stock_steps
    before, _ = run(reserve_blocks)
    assert before <= reserving + 0.5


class SpeaksSoLong(Player):
    """Each request ends after what a text takes, and not at its max_tokens."""

    def sample(self, scheduled):
        output = super().sample(scheduled)
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            request = self.scheduler.requests[name]
            if tokens and request.num_output_tokens + 1 >= SPOKEN:
                tokens[:] = [STOP]
        return output
