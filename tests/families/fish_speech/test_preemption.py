"""A preempted request goes on as if it had not been: bit for bit, frame for frame.

Everything is the host's or ours but attention: the scheduler and its KV cache, the
slow AR's `preprocess` and `talker_mtp`, and what stage 0 sends to stage 1. A position's
KV is a digest of its row, and what is sampled follows from all KV before it; so one row
that is built otherwise, or one block that is found and should not be, changes all that
follows.
"""

import hashlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus
from vllm_omni.outputs import OmniModelRunnerOutput

from tests.families.fish_speech.case import CASE
from tests.families.fish_speech.voices import Voice, random_codes
from tests.real_scheduler import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    new_request,
    new_scheduler,
    stage_config_of,
)
from tests.real_talker import loaded_talker
from vllm_tts_cache.model_executor.preemption import resume_by_replay

CHUNK, LEFT_CONTEXT = 5, 5
AMPLE = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE + 1
NUM_REQUESTS, MAX_TOKENS = 7, 100
NUM_BLOCKS = 32  # one of them is the null block
# So many frames of each have the same first code, as silence has.
NUM_SILENT = 40
PROCESSOR = (
    "vllm_omni.model_executor.stage_input_processors.fish_speech."
    "slow_ar_to_dac_decoder_async_chunk"
)
CONNECTOR = {
    "name": "SharedMemoryConnector",
    "extra": {
        "codec_chunk_frames": CHUNK,
        "codec_left_context_frames": LEFT_CONTEXT,
        "initial_codec_chunk_frames": 0,
    },
}


@pytest.fixture(scope="module")
def slow_ar(fish_speech_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("slow-ar")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(directory / "samples"))
        with loaded_talker(CASE, fish_speech_checkpoint, directory) as model:
            torch.set_num_threads(1)
            yield model


@pytest.fixture(scope="module")
def stage_config(fish_speech_checkpoint):
    return stage_config_of(
        CASE,
        fish_speech_checkpoint,
        async_chunk=True,
        custom_process_next_stage_input_func=PROCESSOR,
        stage_connector_spec=CONNECTOR,
    )


@pytest.fixture(scope="module")
def voices(slow_ar):
    return [Voice(slow_ar, random_codes(40 + 9 * i, seed=i)) for i in range(3)]


class Engine:
    """Plays the engine core and the v1 runner around the real parts."""

    def __init__(self, slow_ar, scheduler):
        self.slow_ar = slow_ar
        self.scheduler = scheduler
        self.infos: dict[str, dict[str, Any]] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.kv: dict[tuple[int, int], bytes] = {}
        self.spoken: dict[str, list[int]] = {}
        self.num_preemptions = 0
        self.num_replayed = 0
        self.sent = Stage1(scheduler.chunk_transfer_adapter)

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
        self.slow_ar.on_requests_finished(scheduled.finished_req_ids)
        ids = list(scheduled.num_scheduled_tokens)
        for name in ids:
            request = self.scheduler.requests[name]
            self.compute(request, scheduled.num_scheduled_tokens[name])
        self.slow_ar.set_batch_req_ids([])
        output = OmniModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[self.sampled(name) for name in ids],
            inter_stage_outputs=[
                {"audio_codes": self.infos[name]["codes"]["audio"]} for name in ids
            ],
        )
        self.scheduler.update_from_output(scheduled, output)
        self.sent.take()

    def compute(self, request, num_tokens):
        """What the runner does with a request in a step."""
        name, end = request.request_id, request.num_computed_tokens
        start, prompt_len = end - num_tokens, request.num_prompt_tokens
        is_prefill = start < prompt_len
        ids = torch.tensor(list(request.all_token_ids[start:end]), dtype=torch.int32)
        info = self.infos[name]
        info |= {
            "request_id": name,
            "_omni_is_prefill": is_prefill,
            "_omni_num_computed_tokens": start,
            "_omni_prompt_len": prompt_len,
        }
        _, rows, update = self.slow_ar.preprocess(ids, None, **info)
        if num_tokens == 1 and not is_prefill:
            hidden, text_step = update.pop("mtp_inputs")
            rows, codes = self.slow_ar.talker_mtp(
                ids, rows, hidden, text_step, generator=self.generators[name]
            )
            update["codes"] = {"audio": codes}
        else:
            self.num_replayed += max(end - max(start, prompt_len), 0)
        merge(info, update)
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        for position, row in enumerate(rows, start):
            where = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            self.kv[where] = digest(row.view(torch.uint8).numpy().tobytes())
        before = [self.kv[blocks[p // BLOCK_SIZE], p % BLOCK_SIZE] for p in range(end)]
        seed = int.from_bytes(digest(b"".join(before))[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(1, 256, generator=generator, dtype=torch.bfloat16)
        merge(info, self.slow_ar.postprocess(hidden))
        code = seed % 4_096 if end >= prompt_len + NUM_SILENT else 7
        self.spoken[name] = [] if end < request.num_tokens else [code]

    def sampled(self, name):
        return [self.slow_ar._semantic_begin_id + code for code in self.spoken[name]]


class Stage1:
    """What stage 0's real sender hands to its connector."""

    def __init__(self, adapter):
        adapter.stop_event.set()  # its threads would be in nobody's order
        for thread in (adapter.save_thread, adapter.recv_thread):
            thread.join()
        self.adapter = adapter
        self.frames: dict[str, list[torch.Tensor]] = defaultdict(list)
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
        codes = data.codes.audio.reshape(10, -1).T
        self.frames[name] += list(codes[data.meta.left_context_size or 0 :])
        if data.meta.finished:
            self.finished.append(name)
        return True, codes.numel(), None


def digest(data):
    return hashlib.sha256(data).digest()


def merge(buffer, update):
    for name, value in update.items():
        if isinstance(value, dict):
            merge(buffer.setdefault(name, {}), value)
        else:
            buffer[name] = value


def unhooked(*args, **kwargs):
    return new_scheduler(*args, **kwargs, hooked=False)


def requests(voices, slow_ar):
    """Clones, two of a voice and text among them, and one of no voice."""
    texts = slow_ar._get_tokenizer().encode("The keeper counts the ships.")
    for number in range(NUM_REQUESTS):
        name = f"speech{number}"
        max_tokens = MAX_TOKENS - 7 * (number % 4)
        if number == 3:
            yield new_request(name, texts, max_tokens), {}
            continue
        voice = voices[number % 3]
        salt = voice.ref.audio_sha256
        prompt = voice.ids.tolist()
        yield new_request(name, prompt, max_tokens, cache_salt=salt), voice.info


def speak(slow_ar, voices, scheduler, before_step=lambda _: None):
    """Tokens and sent frames of every request."""
    engine = Engine(slow_ar, scheduler)
    every = list(requests(voices, slow_ar))
    for request, info in every:
        engine.add(request, info)
    engine.finish(before_step=lambda: before_step(engine))
    tokens = {r.request_id: list(r.output_token_ids) for r, _ in every}
    return (
        engine,
        tokens,
        {name: torch.stack(frames) for name, frames in engine.sent.frames.items()},
    )


@pytest.fixture(scope="module")
def undisturbed(slow_ar, stage_config, voices):
    scheduler = unhooked(stage_config, num_blocks=AMPLE)
    resume_by_replay(scheduler)
    engine, tokens, frames = speak(slow_ar, voices, scheduler)
    assert engine.num_preemptions == engine.num_replayed == 0
    return tokens, frames


def assert_same(found, expected):
    (tokens, frames), (expected_tokens, expected_frames) = found, expected
    assert tokens == expected_tokens
    assert frames.keys() == expected_frames.keys()
    for name in expected_frames:
        assert torch.equal(frames[name], expected_frames[name]), name


def test_each_token_is_spoken_as_one_frame(undisturbed):
    tokens, frames = undisturbed
    assert len(tokens) == NUM_REQUESTS
    for name, spoken in tokens.items():
        # The last token that is sampled is not decoded: no frame comes of it.
        assert len(frames[name]) == len(spoken) - 1
        first = 151_678
        assert frames[name][:, 0].tolist() == [token - first for token in spoken[:-1]]


@pytest.mark.parametrize(
    ("policy", "chunk"), [("fcfs", 0), ("fcfs", 17), ("priority", 33)]
)
def test_a_preempted_request_says_what_it_would_have_said(
    slow_ar, stage_config, voices, undisturbed, policy, chunk
):
    scheduler = unhooked(stage_config, num_blocks=NUM_BLOCKS, policy=policy)
    scheduler.scheduler_config.long_prefill_token_threshold = chunk
    resume_by_replay(scheduler)
    engine, *found = speak(slow_ar, voices, scheduler)
    assert engine.num_preemptions > 3
    assert engine.num_replayed > 50
    assert_same(found, undisturbed)
    assert sorted(engine.sent.finished) == sorted(undisturbed[0])
    assert len(slow_ar._spoken) == 0


def test_it_may_be_preempted_in_any_step(slow_ar, stage_config, voices, undisturbed):
    """As `reset_prefix_cache` does: all of them, prefilling or speaking, repeatedly."""
    scheduler = unhooked(stage_config, num_blocks=AMPLE)
    scheduler.scheduler_config.long_prefill_token_threshold = 29
    resume_by_replay(scheduler)
    steps = iter(range(10_000))

    def preempt(_):
        if next(steps) % 23 == 22:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)

    engine, *found = speak(slow_ar, voices, scheduler, preempt)
    assert engine.num_replayed > 100
    assert_same(found, undisturbed)


def test_an_aborted_request_leaves_nothing(slow_ar, stage_config, voices):
    scheduler = unhooked(stage_config, num_blocks=NUM_BLOCKS)
    resume_by_replay(scheduler)

    def abort(engine):
        waiting = [r.request_id for r in scheduler.waiting if r.num_output_tokens]
        if waiting:
            status = RequestStatus.FINISHED_ABORTED
            scheduler.finish_requests(waiting[0], status)

    engine, *_ = speak(slow_ar, voices, scheduler, abort)
    assert engine.num_preemptions
    assert len(slow_ar._spoken) == 0


@pytest.mark.long  # that the tests above can fail
@pytest.mark.parametrize(
    "left_out", ["_reserve_prefill_lookahead", "_preempt_request", "computed_blocks"]
)
def test_without_any_of_the_hooks_it_says_something_else(
    slow_ar, stage_config, voices, undisturbed, left_out
):
    """The proof above bites."""
    scheduler = unhooked(stage_config, num_blocks=NUM_BLOCKS)
    resume_by_replay(scheduler)
    if left_out == "computed_blocks":
        del scheduler.kv_cache_manager.get_computed_blocks
    else:
        delattr(scheduler, left_out)
    try:
        _, *found = speak(slow_ar, voices, scheduler)
        differs = found != undisturbed and not same(found, undisturbed)
    except Exception:  # noqa: BLE001  the host's code is not made for it
        differs = True
    finally:
        slow_ar._spoken._requests.clear()
        slow_ar._failed_requests._ids.clear()
    assert differs


def same(found, expected):
    try:
        assert_same(found, expected)
    except AssertionError:
        return False
    return True
