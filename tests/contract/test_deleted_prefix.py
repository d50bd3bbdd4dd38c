"""The KV of a deleted voice is found by nobody: the real scheduler, and its core."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler
from vllm_omni.engine.serialization import serialize_additional_information

from tests.contract.test_failed_prefix import hooked, num_cached, step
from tests.real_scheduler import BLOCK_SIZE, STOP, new_request, new_scheduler
from vllm_tts_cache.model_executor.kv_room import audio_of
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.speaker.rpc_client import DELETE, STATS

ANN, BOB = "a" * 64, "b" * 64
NUM_BLOCKS_OF_PROMPT = 5
OTHER_TOKEN = 8


@pytest.fixture
def core(stage_config, monkeypatch):
    for kind, name in (
        (OmniARScheduler, "_free_request_blocks"),
        (EngineCore, "collective_rpc"),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    with hooked():
        made: Any = EngineCore.__new__(EngineCore)
        made.scheduler = new_scheduler(stage_config)
        made.model_executor = SimpleNamespace(collective_rpc=lambda *_: ["told"])
        yield made


def speak(core, name, sha, *, ends=True):
    """A request of so many blocks; how many of them were in the cache."""
    prompt = [11] * (NUM_BLOCKS_OF_PROMPT * BLOCK_SIZE + 3)
    request: Any = new_request(name, prompt, 40, cache_salt=sha)
    request.additional_information = {FIELD: [sha, "registered"]} if sha else None
    core.scheduler.add_request(request)
    scheduled, _ = step(core.scheduler, STOP if ends else OTHER_TOKEN)
    return num_cached(scheduled, name) // BLOCK_SIZE


def delete(core, *audios, **fields):
    call = wire.encode(wire.DeleteCall(audio_sha256s=list(audios), **fields))
    assert core.collective_rpc(DELETE.name, 5.0, (call,)) == ["told"]


def num_found(core):
    """How many blocks somebody could find."""
    return len(core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def test_a_deleted_voice_is_computed_again_and_others_are_not(core):
    """Its KV stayed until its blocks were needed."""
    for sha in (ANN, BOB):
        assert speak(core, f"first {sha}", sha) == 0
        assert speak(core, f"second {sha}", sha) == NUM_BLOCKS_OF_PROMPT
    assert core.collective_rpc(STATS.name) == ["told"]
    delete(core, ANN)
    assert speak(core, "ann", ANN) == 0
    assert speak(core, "bob", BOB) == NUM_BLOCKS_OF_PROMPT
    delete(core, everything=True)
    assert [speak(core, f"{sha} again", sha) for sha in (ANN, BOB)] == [0, 0]


def test_what_a_request_of_it_computes_yet_is_not_found_either(core):
    speak(core, "running", ANN, ends=False)
    assert num_found(core) == NUM_BLOCKS_OF_PROMPT
    delete(core, ANN)
    for _ in range(BLOCK_SIZE):  # so that a block of its own speech is full
        step(core.scheduler, OTHER_TOKEN)
    step(core.scheduler, STOP)
    assert not core.scheduler.requests
    assert not num_found(core)
    assert speak(core, "ann", ANN) == 0


@pytest.mark.parametrize("segment", ["registered", "inline"])
def test_one_that_waits_has_nothing_to_lose_and_leaves_nothing(core, segment):
    speak(core, "running", ANN, ends=False)
    waiting: Any = new_request("waiting", 40, 4)
    waiting.additional_information = {FIELD: [BOB, segment]}
    core.scheduler.add_request(waiting)
    if segment == "registered":
        delete(core, BOB)
        step(core.scheduler, STOP)
    else:
        core.scheduler.finish_requests("waiting", RequestStatus.FINISHED_ABORTED)
    assert BOB not in core.scheduler.tts_cache_voice_blocks._blocks


def test_never_more_blocks_are_noted_than_there_are(core):
    """Each voice needs blocks of those before it."""
    for number in range(40):
        speak(core, f"{number}", f"{number:064x}")
    noted = core.scheduler.tts_cache_voice_blocks
    assert len(noted._audio_of) == sum(map(len, noted._blocks.values()))
    assert len(noted._audio_of) < core.scheduler.cache_config.num_gpu_blocks
    assert len(noted._blocks) < 40


def test_who_speaks_is_read_as_the_engine_core_has_it():
    info = {FIELD: [ANN, "registered"], "text": ["Hi."]}
    of = SimpleNamespace
    assert (
        audio_of(of(additional_information=serialize_additional_information(info)))
        == ANN
    )
    assert audio_of(of(additional_information={"text": ["Hi."]})) is None
    assert audio_of(of(additional_information=None)) is None
    assert audio_of(of()) is None
