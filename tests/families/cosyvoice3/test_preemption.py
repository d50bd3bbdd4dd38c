"""A preempted request goes on as if it had not been: bit for bit, code for code.

Everything is the host's or ours but attention: the scheduler and its KV cache, the
talker's `preprocess`, and what stage 0 sends to stage 1. A position's KV is a digest of
its row, and what is sampled follows from all KV before it; so one row that is built
otherwise changes all that follows.
"""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.outputs import OmniModelRunnerOutput
from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

from tests.families.cosyvoice3.case import CASE
from tests.families.cosyvoice3.voices import Prompts, Voice, merge
from tests.real_scheduler import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    STOP,
    new_request,
    new_scheduler,
    stage_config_of,
)
from tests.real_talker import loaded_talker
from vllm_tts_cache.families.cosyvoice3.conditioning import handed_on
from vllm_tts_cache.families.cosyvoice3.family import CROSS_LINGUAL, FAMILY, ZERO_SHOT
from vllm_tts_cache.families.cosyvoice3.text import load_tokenizer
from vllm_tts_cache.model_executor.preemption import resume_by_replay

AMPLE = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE + 1
NUM_BLOCKS = 22  # one of them is the null block
NUM_REQUESTS, MAX_TOKENS = 5, 90
NUM_CODES = 6_561
PROCESSOR = (
    "vllm_omni.model_executor.stage_input_processors.cosyvoice3."
    "talker2code2wav_async_chunk"
)
CONNECTOR = {
    "name": "SharedMemoryConnector",
    "extra": {"codec_chunk_frames": 15, "codec_vocab_size": NUM_CODES},
}


@pytest.fixture(scope="module")
def talker(cosyvoice3_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("talker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(directory / "samples"))
        with loaded_talker(
            CASE, cosyvoice3_checkpoint, directory, enable_prefix_caching=False
        ) as model:
            torch.set_num_threads(1)
            yield model


@pytest.fixture(scope="module")
def stage_config(cosyvoice3_checkpoint):
    return stage_config_of(
        CASE,
        cosyvoice3_checkpoint,
        async_chunk=True,
        enable_prefix_caching=False,
        custom_process_next_stage_input_func=PROCESSOR,
        stage_connector_spec=CONNECTOR,
    )


@pytest.fixture(scope="module")
def spoken(talker, cosyvoice3_checkpoint):
    """Prompts of several lengths, and the voices that they are to be spoken with."""
    tokenizer = load_tokenizer(str(cosyvoice3_checkpoint), None, CosyVoice3Config())
    ours = Prompts(tokenizer)
    voices = [Voice(talker, 1.5 + 0.6 * n, 200.0 + 70 * n) for n in range(3)]
    modes = (ZERO_SHOT, CROSS_LINGUAL)
    return [
        (voices[n % 3], ours(voices[n % 3], modes[n % 2], f"Text number {n}."))
        for n in range(NUM_REQUESTS)
    ]


class Engine:
    """Plays the engine core and the v1 runner around the real parts."""

    def __init__(self, talker, scheduler):
        self.talker = talker
        self.scheduler = scheduler
        self.infos: dict[str, dict[str, Any]] = {}
        self.kv: dict[tuple[int, int], bytes] = {}
        self.sampled: dict[str, list[int]] = {}
        self.num_preemptions = 0
        self.num_replayed = 0
        self.sent = Stage1(scheduler.chunk_transfer_adapter)

    def add(self, request, info):
        self.infos[request.request_id] = dict(info)
        request.external_req_id = request.request_id
        self.scheduler.add_request(request)

    def finish(self, max_steps=5_000, before_step=lambda: None):
        for _ in range(max_steps):
            before_step()
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        pytest.fail(f"after {max_steps} steps some requests still wait")

    def step(self):
        scheduled = self.scheduler.schedule()
        self.num_preemptions += len(scheduled.preempted_req_ids or ())
        ids = list(scheduled.num_scheduled_tokens)
        for name in ids:
            request = self.scheduler.requests[name]
            self.compute(request, scheduled.num_scheduled_tokens[name])
        infos = [self.infos[name] for name in ids]
        told = handed_on(infos, once=True).get("embed", {})
        output = OmniModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[self.sampled[name] for name in ids],
            inter_stage_outputs=[
                {"hidden": torch.zeros(1)}
                | {f"embed.{name}": each[index] for name, each in told.items()}
                for index in range(len(ids))
            ],
        )
        self.scheduler.update_from_output(scheduled, output)
        self.sent.take()

    def compute(self, request, num_tokens):
        """What the runner does with a request in a step."""
        name, end = request.request_id, request.num_computed_tokens
        start, prompt_len = end - num_tokens, request.num_prompt_tokens
        ids = torch.tensor(list(request.all_token_ids[start:end]), dtype=torch.int32)
        info = self.infos[name]
        info |= {
            "request_id": name,
            "_omni_is_prefill": start < prompt_len,
            "_omni_num_computed_tokens": start,
            "_omni_prompt_len": prompt_len,
        }
        with torch.inference_mode():
            _, rows, update = self.talker.preprocess(ids, None, **info)
        merge(info, update)
        if num_tokens > 1 and request.num_output_tokens:
            self.num_replayed += max(end - max(start, prompt_len), 0)
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        for position, row in enumerate(rows, start):
            where = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            self.kv[where] = digest(
                row.contiguous().view(torch.uint8).numpy().tobytes()
            )
        before = [self.kv[blocks[p // BLOCK_SIZE], p % BLOCK_SIZE] for p in range(end)]
        drawn = int.from_bytes(digest(b"".join(before))[:7], "big")
        code = STOP + 1 + drawn % (NUM_CODES - STOP - 1)
        self.sampled[name] = [] if end < request.num_tokens else [code]


class Stage1:
    """What stage 0's real sender hands to its connector."""

    def __init__(self, adapter):
        adapter.stop_event.set()  # its threads would be in nobody's order
        for thread in (adapter.save_thread, adapter.recv_thread):
            thread.join()
        self.adapter = adapter
        self.codes: dict[str, list[list[int]]] = {}
        self.told: dict[str, Any] = {}
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
        if data.codes is not None:
            self.codes.setdefault(name, []).append(data.codes.audio.tolist())
        if data.embed is not None:
            assert name not in self.told
            self.told[name] = data.embed
        if data.meta.finished:
            self.finished.append(name)
        return True, 0, None


def digest(data):
    return hashlib.sha256(data).digest()


def unhooked(*args, **kwargs):
    return new_scheduler(*args, **kwargs, hooked=False)


def speak(talker, spoken, scheduler, before_step=lambda _: None):
    """Tokens of every request, and all that was sent."""
    engine = Engine(talker, scheduler)
    every = [
        (
            new_request(f"speech{n}", prompt["prompt_token_ids"], MAX_TOKENS - 7 * n),
            prompt["additional_information"],
        )
        for n, (_, prompt) in enumerate(spoken)
    ]
    for request, info in every:
        engine.add(request, info)
    engine.finish(before_step=lambda: before_step(engine))
    assert not talker._failed_requests._ids
    return engine, {r.request_id: list(r.output_token_ids) for r, _ in every}


@pytest.fixture(scope="module")
def undisturbed(talker, stage_config, spoken):
    scheduler = unhooked(stage_config, num_blocks=AMPLE)
    resume_by_replay(scheduler)
    engine, tokens = speak(talker, spoken, scheduler)
    assert engine.num_preemptions == engine.num_replayed == 0
    return engine.sent, tokens


def assert_same(engine, tokens, undisturbed, spoken):
    sent, expected = undisturbed
    assert tokens == expected
    assert engine.sent.codes == sent.codes
    assert sorted(engine.sent.finished) == sorted(expected)
    for number, (voice, _) in enumerate(spoken):
        told = engine.sent.told[f"speech{number}"]
        for name, tensor in voice.used().items():
            assert torch.equal(getattr(told, name), tensor)


def test_all_that_is_spoken_is_sent_once(undisturbed):
    sent, tokens = undisturbed
    assert len(tokens) == NUM_REQUESTS
    for name, spoken in tokens.items():
        assert len(spoken) > 50
        # Each chunk has all codes from the first one on.
        *chunks, whole = sent.codes[name]
        assert whole == spoken
        assert all(whole[: len(chunk)] == chunk for chunk in chunks)
        assert len({len(chunk) for chunk in sent.codes[name]}) == len(chunks) + 1


@pytest.mark.parametrize(
    ("policy", "chunk"), [("fcfs", 0), ("fcfs", 17), ("priority", 33)]
)
def test_a_preempted_request_says_what_it_would_have_said(
    talker, stage_config, spoken, undisturbed, policy, chunk
):
    scheduler = unhooked(stage_config, num_blocks=NUM_BLOCKS, policy=policy)
    scheduler.scheduler_config.long_prefill_token_threshold = chunk
    resume_by_replay(scheduler)
    engine, tokens = speak(talker, spoken, scheduler)
    assert engine.num_preemptions > 1
    assert engine.num_replayed > 30
    assert_same(engine, tokens, undisturbed, spoken)


def test_it_may_be_preempted_in_any_step(talker, stage_config, spoken, undisturbed):
    """As `reset_prefix_cache` does: all of them, prefilling or speaking, repeatedly."""
    scheduler = unhooked(stage_config, num_blocks=AMPLE)
    scheduler.scheduler_config.long_prefill_token_threshold = 29
    resume_by_replay(scheduler)
    steps = iter(range(100_000))

    def preempt(_):
        if next(steps) % 23 == 22 and scheduler.running:
            scheduler.reset_prefix_cache(reset_running_requests=True)

    engine, tokens = speak(talker, spoken, scheduler, preempt)
    assert engine.num_replayed > 30
    assert_same(engine, tokens, undisturbed, spoken)


def test_the_family_says_so():
    assert FAMILY.resumes and FAMILY.plausible_tokens is None
