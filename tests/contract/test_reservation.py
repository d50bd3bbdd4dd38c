"""A talker that cannot resume is not preempted: the host's own scheduler says so.

The scheduler is real, with a KV cache too small for its load; only the model is
played, by a dice that says which token each request samples and which stop early.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm_omni.core.sched.omni_ar_scheduler import OmniARAsyncScheduler, OmniARScheduler
from vllm_omni.core.sched.omni_cfg_ar_scheduler import OmniCFGARScheduler
from vllm_omni.engine.serialization import serialize_additional_information

from tests.families.cases import cases
from tests.real_scheduler import (
    ATTENTION,
    BLOCK_SIZE,
    FULL,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    STOP,
    new_request,
    new_scheduler,
)
from vllm_tts_cache.model_executor import kv_room

OTHER = 8
SLIDING = SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=64, **ATTENTION)


@pytest.fixture
def installed():
    """As of a family that cannot resume, and says nothing of its texts."""
    family = SimpleNamespace(resumes=False, plausible_tokens=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmniARScheduler, "__init__", OmniARScheduler.__init__)
        patch.setattr(kv_room, "family_of_model", lambda *_: family)
        kv_room.install()
        yield family


def reserves(scheduler):
    allocate = scheduler.kv_cache_manager.allocate_slots
    return isinstance(allocate, kv_room.ReservingAllocator)


def usable_blocks(scheduler):
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@dataclass
class Player:
    """Plays the engine and its model: schedules, samples, gives the tokens back."""

    scheduler: OmniARScheduler
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    stop_rate: float = 0.0
    preempted: list[str] = field(default_factory=list)
    in_flight: deque = field(default_factory=deque)

    def step(self):
        scheduled = self.scheduler.schedule()
        self.preempted += sorted(scheduled.preempted_req_ids or ())
        if scheduled.num_scheduled_tokens:
            self.in_flight.append((scheduled, self.sample(scheduled)))
        is_asynchronous = isinstance(self.scheduler, OmniARAsyncScheduler)
        depth = 2 if is_asynchronous else 1
        if self.in_flight and (
            len(self.in_flight) == depth or not scheduled.num_scheduled_tokens
        ):
            self.scheduler.update_from_output(*self.in_flight.popleft())
        return scheduled

    def sample(self, scheduled):
        ids = list(scheduled.num_scheduled_tokens)
        partial = {i for i in ids if self.scheduler.requests[i].is_prefill_chunk}
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[[] if i in partial else [self.token()] for i in ids],
        )

    def token(self):
        return STOP if self.dice.random() < self.stop_rate else OTHER

    def running(self):
        return [request.request_id for request in self.scheduler.running]

    def finish(self, max_steps=20_000, before_step=lambda: None):
        for _ in range(max_steps):
            if not (self.scheduler.has_unfinished_requests() or self.in_flight):
                return
            before_step()
            self.step()
        pytest.fail(f"after {max_steps} steps some requests still wait")


def random_requests(dice, number):
    voices = [[voice] * dice.randint(40, 160) for voice in range(100, 104)]
    return [
        new_request(
            f"request-{i}",
            dice.choice(voices)
            + [dice.randint(200, 999) for _ in range(dice.randint(1, 90))],
            dice.randint(1, 400),
            priority=dice.randint(0, 3),
        )
        for i in range(number)
    ]


def play_load(scheduler, seed, number=120):
    """Send random requests in bursts, abort some, play until the last has ended."""
    dice = random.Random(seed)
    player = Player(scheduler, dice, stop_rate=0.004)
    requests = random_requests(dice, number)
    to_send = list(requests)

    def meddle():
        for _ in range(min(len(to_send), dice.choice([0, 0, 0, 1, 6]))):
            scheduler.add_request(to_send.pop())
        if scheduler.requests and dice.random() < 0.02:
            aborted = dice.choice(sorted(scheduler.requests))
            scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)

    scheduler.add_request(to_send.pop())
    player.finish(before_step=meddle)
    assert not to_send
    return player, requests


LOADS = [(False, "fcfs", 1), (False, "priority", 2)]
LOADS += [(True, "fcfs", 3), (True, "priority", 4)]


@pytest.mark.parametrize(("asynchronous", "policy", "seed"), LOADS)
def test_no_request_is_preempted_and_every_one_ends(
    stage_config, installed, asynchronous, policy, seed
):
    scheduler = new_scheduler(stage_config, asynchronous=asynchronous, policy=policy)
    num_usable = usable_blocks(scheduler)
    player, requests = play_load(scheduler, seed)
    assert player.preempted == []
    assert [request.num_preemptions for request in requests] == [0] * len(requests)
    assert all(request.is_finished() for request in requests)
    ends = {request.status for request in requests}
    assert {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_ABORTED,
    } <= ends, "the load did not exercise every end"
    assert usable_blocks(scheduler) == num_usable
    assert not scheduler.requests


def test_with_several_kv_cache_groups_no_request_is_preempted(stage_config, installed):
    scheduler = new_scheduler(stage_config, groups=(FULL, SLIDING))
    player, _ = play_load(scheduler, seed=5, number=60)
    assert player.preempted == []


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "resumable", "expected"),
    [
        (100, 50, False, 151),
        (100, 410, False, 511),
        (100, 411, False, MAX_MODEL_LEN),
        (100, 9_999, False, MAX_MODEL_LEN),
        (100, 50, True, MAX_MODEL_LEN),
    ],
)
def test_the_worst_case_is_prompt_and_output_up_to_the_models_length(
    stage_config, installed, num_prompt_tokens, max_tokens, resumable, expected
):
    allocator = kv_room.ReservingAllocator(new_scheduler(stage_config))
    request = new_request("one", num_prompt_tokens, max_tokens, resumable=resumable)
    assert allocator.num_tokens_reserved(request) == expected


@pytest.mark.parametrize(("num_blocks", "both"), [(17, True), (16, False)])
def test_a_request_starts_when_its_last_block_fits_and_not_before(
    stage_config, installed, num_blocks, both
):
    player = Player(new_scheduler(stage_config, num_blocks=num_blocks))
    # With the token of a step in flight each takes 8 blocks, of 16 or 15 usable ones.
    for name in ("first", "second"):
        player.scheduler.add_request(new_request(name, 40, 8 * BLOCK_SIZE - 41))
    player.step()
    assert player.running() == (["first", "second"] if both else ["first"])
    player.finish()
    assert player.preempted == []


def test_one_that_waits_holds_nothing_until_another_ends(stage_config, installed):
    player = Player(new_scheduler(stage_config, num_blocks=20))
    scheduler = player.scheduler
    scheduler.add_request(new_request("long", 10, 400))
    scheduler.add_request(new_request("next", 10, 300))
    scheduler.add_request(new_request("short", 10, 10))
    for _ in range(3):
        player.step()
    assert player.running() == ["long"], "the queue's order is kept"
    assert scheduler.kv_cache_manager.get_block_ids("next") == ([],)
    scheduler.finish_requests("long", RequestStatus.FINISHED_ABORTED)
    player.step()
    assert player.running() == ["next", "short"]


def test_a_prompt_prefix_in_use_counts_once(stage_config, installed):
    voice = [5] * (8 * BLOCK_SIZE)
    player = Player(new_scheduler(stage_config, num_blocks=14))
    for name in ("first", "second"):
        player.scheduler.add_request(new_request(name, [*voice, 6], 30))
        player.step()
    assert player.running() == ["first", "second"]
    player.finish()
    assert player.preempted == []


def test_a_paused_session_does_not_hold_up_the_others(stage_config, installed):
    player = Player(new_scheduler(stage_config, num_blocks=20), stop_rate=1.0)
    scheduler = player.scheduler
    scheduler.add_request(new_request("session", 100, 10, resumable=True))
    player.step()
    assert scheduler.num_waiting_for_streaming_input == 1
    assert scheduler.kv_cache_manager.get_block_ids("session") != ([],)
    # At worst it needs one block more than the session leaves; it stops at once.
    scheduler.add_request(new_request("other", 10, 490))
    assert "other" in player.step().num_scheduled_tokens
    player.finish()
    assert player.preempted == []


def test_with_an_ample_cache_nothing_is_hooked(stage_config, installed, caplog):
    longest = MAX_MODEL_LEN // BLOCK_SIZE
    ample = MAX_NUM_SEQS * longest + 1
    assert not reserves(new_scheduler(stage_config, num_blocks=ample))
    assert "KV cache" not in caplog.text
    assert reserves(new_scheduler(stage_config, num_blocks=ample - 1))


def test_where_two_requests_speak_one_text_the_host_reserves(stage_config, installed):
    """Its scheduler admits both of them or none; a no of ours to one is its end."""

    class Pairs(OmniCFGARScheduler):
        def __init__(self, *args, **kwargs):  # without what it asks of the settings
            OmniARScheduler.__init__(self, *args, **kwargs)

    assert reserves(new_scheduler(stage_config))
    assert not reserves(new_scheduler(stage_config, kind=Pairs))


def test_each_family_says_whether_it_resumes(stage_config):
    """As the list has it, by the architecture that vLLM's configuration names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmniARScheduler, "__init__", OmniARScheduler.__init__)
        kv_room.install()
        for case in cases():
            architecture = case.stage["model_arch"]
            scheduler = new_scheduler(stage_config, architecture=architecture)
            assert reserves(scheduler) is not case.family.resumes
        scheduler = new_scheduler(stage_config, architecture="LlamaForCausalLM")
        assert not reserves(scheduler)


def test_a_small_cache_is_reported_with_what_to_change(stage_config, installed):
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        told = lambda text, *args: lines.append(text % args)  # noqa: E731
        patch.setattr(kv_room.logger, "warning", told)
        Player(new_scheduler(stage_config)).step()
    (line,) = lines
    assert "holds 2 of the max_num_seqs=8 requests of max_model_len=512" in line
    for name in ("gpu_memory_utilization", "kv_cache_memory_bytes", "max_tokens"):
        assert name in line


# A family that knows what a text takes


def of_text(name, prompt, max_tokens, text):
    request: Any = new_request(name, prompt, max_tokens)
    request.additional_information = {"text": [text]}
    return request


@pytest.fixture
def plausible(installed):
    """A letter a token."""
    installed.plausible_tokens = len
    return installed


@pytest.mark.parametrize(
    ("text", "num_spoken", "expected"),
    [
        ("x" * 60, 0, 100 + 60 + 1),
        ("x" * 60, 60, 100 + 60 + 1),
        ("x" * 60, 62, 100 + 200 + 1),  # it outgrew its text
        ("x" * 999, 0, 100 + 200 + 1),
        ("", 0, 100 + 200 + 1),
    ],
)
def test_a_request_counts_with_what_its_text_plausibly_takes(
    stage_config, plausible, text, num_spoken, expected
):
    scheduler = new_scheduler(stage_config)
    allocator = kv_room.ReservingAllocator(scheduler, plausible.plausible_tokens)
    request = of_text("one", 100, 200, text)
    request.append_output_token_ids([OTHER] * num_spoken)
    assert allocator.num_tokens_reserved(request) == expected


def test_the_text_is_found_as_it_crosses_to_the_engine(stage_config, plausible):
    request = of_text("one", 100, 200, "x" * 60)
    for value in (["x" * 60], "x" * 60):
        information = serialize_additional_information({"text": value})
        request.additional_information = information
        assert kv_room._text_of(request) == "x" * 60
    for unknown in ({}, None, {"text": []}, {"text": [7]}):
        request.additional_information = unknown
        assert kv_room._text_of(request) is None


def test_a_request_that_outgrows_its_text_holds_up_new_ones(stage_config, plausible):
    player = Player(new_scheduler(stage_config, num_blocks=20))
    scheduler = player.scheduler
    scheduler.add_request(of_text("drone", 40, 470, "x" * 60))
    while len(scheduler.requests["drone"].output_token_ids) < 70:
        player.step()
    scheduler.add_request(of_text("new", 40, 470, "x" * 60))
    player.step()
    assert player.running() == ["drone"]
    player.finish()
    assert player.preempted == []


def test_a_request_that_is_preempted_even_so_ends_as_an_error(stage_config, plausible):
    player = Player(new_scheduler(stage_config, num_blocks=20))
    for name in ("first", "second"):
        player.scheduler.add_request(of_text(name, 40, 470, "x" * 60))
    told = []
    host = player.scheduler.update_from_output

    def update(*args):
        told.extend(o for each in host(*args).values() for o in each.outputs)

    scheduler: Any = player.scheduler
    scheduler.update_from_output = update
    player.finish()
    assert player.preempted == ["second"]
    ends = {o.request_id: o for o in told if o.finish_reason is not None}
    assert ends["first"].finish_reason is FinishReason.LENGTH
    assert ends["second"].finish_reason is FinishReason.ERROR
    assert "gpu_memory_utilization" in str(ends["second"].stop_reason)
    assert [o.request_id for o in told].count("second") == len(
        [o for o in told if o.request_id == "second" and o.new_token_ids]
    ) + 1
    assert not player.scheduler.requests


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nobody_goes_on_after_all_were_preempted(stage_config, installed, asynchronous):
    scheduler = new_scheduler(stage_config, asynchronous=asynchronous, num_blocks=200)
    player = Player(scheduler)
    for name in ("first", "second"):
        scheduler.add_request(new_request(name, 40, 100))
    for _ in range(6):
        player.step()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.add_request(new_request("third", 40, 10))
    player.finish()
    assert not scheduler.requests
