"""A preempted request goes on as if it had not been: bit for bit, frame for frame.

Everything is the host's or ours but attention: the scheduler and its KV cache, the
talker's `preprocess`, and what stage 0 sends to stage 1. A position's KV is a digest of
its row, and what is sampled follows from all KV before it; so one row that is built
otherwise, or one block that is found and should not be, changes all that follows. What
is a family's own of it is `Speech`, in ``voices.py`` of its folder.
"""

import hashlib
from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus
from vllm_omni.outputs import OmniModelRunnerOutput

from tests.families.cases import cases, of
from tests.families.runner import as_the_runner_says, merge
from tests.real_scheduler import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    new_request,
    stage_config_of,
    unhooked_scheduler,
)
from vllm_tts_cache.model_executor.kv_room import resume_by_replay

STEPS = ("fcfs", 17), ("fcfs", 0), ("priority", 33)
AMPLE = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE + 1
pytestmark = of(
    case for case in cases() if case.family.resumes and not case.family.pipelines
)


@pytest.fixture(scope="module")
def speech(own_case, own_checkpoint, talker):
    torch.set_num_threads(1)
    part = import_module(f"tests.families.{own_case.name}.voices")
    return part.Speech(talker, own_checkpoint)


@pytest.fixture(scope="module")
def scheduler(own_case, own_checkpoint, speech):
    """Makes one of so many blocks that replays what was spoken."""
    processors = f"vllm_omni.model_executor.stage_input_processors.{own_case.name}"
    config = stage_config_of(
        own_case,
        own_checkpoint,
        async_chunk=True,
        custom_process_next_stage_input_func=f"{processors}.{speech.processor}",
        stage_connector_spec={
            "name": "SharedMemoryConnector",
            "extra": speech.connector,
        },
        **own_case.loading,
    )

    def make(num_blocks=speech.num_blocks, chunk=0, **kwargs):
        made = unhooked_scheduler(config, num_blocks=num_blocks, **kwargs)
        made.scheduler_config.long_prefill_token_threshold = chunk
        resume_by_replay(made)
        return made

    return make


class Engine:
    """Plays the engine core and the v1 runner around the real parts."""

    def __init__(self, speech, scheduler):
        self.speech, self.talker, self.scheduler = speech, speech.talker, scheduler
        self.infos: dict[str, dict[str, Any]] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.kv: dict[tuple[int, int], bytes] = {}
        self.sampled: dict[str, list[int]] = {}
        self.num_preemptions = 0
        self.num_replayed = 0
        self.sent = Stage1(speech, scheduler.chunk_transfer_adapter)

    def add(self, request, info):
        self.infos[request.request_id] = dict(info)
        seed = torch.Generator().manual_seed(len(self.generators))
        self.generators[request.request_id] = seed
        request.external_req_id = request.request_id
        self.scheduler.add_request(request)

    def finish(self, max_steps=5_000, before_step=lambda: None):
        for _ in range(max_steps):
            before_step()
            if not self.scheduler.has_unfinished_requests():
                self.step()  # in which the worker is told who has ended
                return
            self.step()
        pytest.fail(f"after {max_steps} steps some requests still wait")

    def step(self):
        scheduled = self.scheduler.schedule()
        self.num_preemptions += len(scheduled.preempted_req_ids or ())
        self.speech.ended(scheduled.finished_req_ids)
        ids = list(scheduled.num_scheduled_tokens)
        for name in ids:
            request = self.scheduler.requests[name]
            self.compute(request, scheduled.num_scheduled_tokens[name])
        output = OmniModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[self.sampled[name] for name in ids],
            inter_stage_outputs=self.speech.outputs([self.infos[n] for n in ids]),
        )
        self.scheduler.update_from_output(scheduled, output)
        self.sent.take()

    def compute(self, request, num_tokens):
        """What the runner does with a request in a step."""
        name, end = request.request_id, request.num_computed_tokens
        start, prompt_len = end - num_tokens, request.num_prompt_tokens
        ids = torch.tensor(list(request.all_token_ids[start:end]), dtype=torch.int32)
        info = self.infos[name]
        info |= as_the_runner_says(name, start, prompt_len)
        with torch.inference_mode():
            _, rows, update = self.talker.preprocess(ids, None, **info)
            if num_tokens == 1 and start >= prompt_len:
                rows = self.speech.decoded(ids, rows, update, self.generators[name])
        if num_tokens > 1 and request.num_output_tokens:
            self.num_replayed += max(end - max(start, prompt_len), 0)
        merge(info, update)
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        for position, row in enumerate(rows, start):
            where = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            self.kv[where] = digest(
                row.contiguous().view(torch.uint8).numpy().tobytes()
            )
        before = [self.kv[blocks[p // BLOCK_SIZE], p % BLOCK_SIZE] for p in range(end)]
        drawn = int.from_bytes(digest(b"".join(before))[:7], "big")
        token = self.speech.sample(drawn, info, end - prompt_len)
        self.sampled[name] = [] if end < request.num_tokens else [token]


class Stage1:
    """What stage 0's real sender hands to its connector."""

    def __init__(self, speech, adapter):
        adapter.stop_event.set()  # its threads would be in nobody's order
        for thread in (adapter.save_thread, adapter.recv_thread):
            thread.join()
        self.adapter, self.speech = adapter, speech
        self.parts: dict[str, list[Any]] = defaultdict(list)
        self.finished: list[str] = []
        adapter.connector = SimpleNamespace(
            put=self.put, stage_id=0, config=adapter.connector.config
        )

    def take(self):
        while self.adapter._pending_save_reqs:
            task = self.adapter._pending_save_reqs.popleft()
            self.adapter._send_single_request(task)

    def put(self, from_stage, to_stage, put_key, data):
        name = put_key.split("_")[0]
        self.parts[name] += self.speech.received(data)
        if data.meta.finished:
            self.finished.append(name)
        return True, 0, None


def digest(data):
    return hashlib.sha256(data).digest()


def speak(speech, scheduler, before_step=lambda _: None):
    """Tokens of every request, and all that was sent."""
    engine, tokens = Engine(speech, scheduler), {}
    for number, (prompt, info, more) in enumerate(speech.prompts):
        request = new_request(f"speech{number}", prompt, 100 - 7 * (number % 4), **more)
        engine.add(request, info)
        tokens[request.request_id] = request.output_token_ids
    engine.finish(before_step=lambda: before_step(engine))
    assert not speech.talker._failed_requests._ids
    return engine, {name: list(ids) for name, ids in tokens.items()}


@pytest.fixture(scope="module")
def undisturbed(speech, scheduler):
    engine, tokens = speak(speech, scheduler(AMPLE))
    assert engine.num_preemptions == engine.num_replayed == 0
    return engine, tokens


def is_same(found, undisturbed):
    (engine, tokens), (expected, expected_tokens) = found, undisturbed
    return (
        tokens == expected_tokens
        and engine.sent.parts == expected.sent.parts
        and sorted(engine.sent.finished) == sorted(tokens)
    )


def test_all_that_is_spoken_is_sent_once(speech, undisturbed):
    engine, tokens = undisturbed
    assert len(tokens) == len(speech.prompts)
    for number, (name, spoken) in enumerate(tokens.items()):
        assert len(spoken) > 50
        speech.check_sent(number, spoken, engine.sent.parts[name])


@pytest.mark.parametrize(("policy", "chunk"), STEPS)
def test_a_preempted_request_says_what_it_would_have_said(
    speech, scheduler, undisturbed, policy, chunk
):
    found = speak(speech, scheduler(chunk=chunk, policy=policy))
    assert found[0].num_preemptions > 1
    assert found[0].num_replayed > 30
    assert is_same(found, undisturbed)
    assert speech.num_kept() == 0


def test_it_may_be_preempted_in_any_step(speech, scheduler, undisturbed):
    """As `reset_prefix_cache` does: all of them, prefilling or speaking, repeatedly."""
    made, steps = scheduler(AMPLE, chunk=29), iter(range(100_000))

    def preempt(_):
        if next(steps) % 23 == 22 and made.running:
            assert made.reset_prefix_cache(reset_running_requests=True)

    found = speak(speech, made, preempt)
    assert found[0].num_replayed > 30
    assert is_same(found, undisturbed)


def test_an_aborted_request_leaves_nothing(speech, scheduler):
    made = scheduler()

    def abort(_):
        waiting = [r.request_id for r in made.waiting if r.num_output_tokens]
        if waiting:
            made.finish_requests(waiting[0], RequestStatus.FINISHED_ABORTED)

    engine, _ = speak(speech, made, abort)
    assert engine.num_preemptions
    assert speech.num_kept() == 0
