"""Stage 1 of Qwen3-TTS as the host's runners call it, beside the host's own class."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_code2wav import (
    Qwen3TTSCode2Wav,
)

from tests.families.qwen3_tts.decoders import CHUNK, WINDOW, codes_of
from tests.real_talker import loaded
from vllm_tts_cache import logs
from vllm_tts_cache.families.qwen3_tts.code2wav import CachedQwen3TTSCode2Wav
from vllm_tts_cache.families.qwen3_tts.family import HANDED_ON
from vllm_tts_cache.model_executor.decoder_states import DecoderStates

VOICE = "a" * 64
# Of samples between -1 and 1.
TOLERANCE = 1e-5
STAGE = {
    "model_stage": "code2wav",
    "model_arch": "Qwen3TTSCode2Wav",
    "worker_type": "generation",
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def loaded_stage(own_checkpoint, tmp_path_factory):
    """Both classes, with the weights of the tiny checkpoint."""
    with loaded(own_checkpoint, tmp_path_factory.mktemp("stage-1"), **STAGE) as ours:
        assert type(ours) is CachedQwen3TTSCode2Wav
        hosts = Qwen3TTSCode2Wav(vllm_config=ours.vllm_config)
        hosts.load_weights(iter(()))
        yield SimpleNamespace(ours=ours, hosts=hosts)


@pytest.fixture
def stage(loaded_stage):
    """The same, and nothing remembered."""
    for model in (loaded_stage.ours, loaded_stage.hosts):
        model._decoder_state_cache.clear()
    ours, states = loaded_stage.ours, DecoderStates(max_bytes=1 << 30)
    ours.tts_cache_decoder_states = ours._prefixes._states = states
    loaded_stage.states = states
    return loaded_stage


class Chunk:
    """What stage 1 is given of a request in one step.

    ``codes``: ``(16, num_frames)``, those of the reference in front.
    """

    def __init__(self, request_id, codes, num_reference=0, *, voice=VOICE, end=False):
        self.codes = codes
        self.info: dict[str, Any] = {
            "meta": {"request_id": request_id, "finished": end},
            HANDED_ON: [voice],
        }
        if num_reference:
            self.info["meta"] |= {
                "ref_context_size": num_reference,
                "ref_context_request_id": request_id,
                "ref_context_included": codes.shape[1] > num_reference,
            }


def stepped(model, *chunks, request_ids=None, key="model_intermediate_buffer"):
    """The samples of each request of one step."""
    known = {} if request_ids is None else {"request_ids": request_ids}
    output = model(
        torch.cat([chunk.codes.reshape(-1) for chunk in chunks]),
        seq_token_counts=[chunk.codes.numel() for chunk in chunks],
        **{key: [chunk.info for chunk in chunks]},
        **known,
    )
    return output.multimodal_outputs["model_outputs"]


def clone(request_id, seed, **options):
    """A clone in context: its first chunk, and the two behind it."""
    spoken = codes_of(1 + 2 * CHUNK, seed + 100, 2048)
    begun = torch.cat([codes_of(WINDOW, seed, 2048), spoken[:, :1]], dim=1)
    later = spoken[:, 1:].split(CHUNK, dim=1)
    return [
        Chunk(request_id, begun, WINDOW, **options),
        *(Chunk(request_id, codes, WINDOW, **options) for codes in later),
    ]


@pytest.mark.parametrize("of_runner", [True, False], ids=["request_ids", "meta"])
@pytest.mark.parametrize(
    "key", ["model_intermediate_buffer", "runtime_additional_information"]
)
def test_clones_and_presets_of_one_step_sound_as_the_hosts(stage, of_runner, key):
    preset = codes_of(1 + 2 * CHUNK, 50, 2048).split([1, CHUNK, CHUNK], dim=1)
    steps = zip(
        clone("a", 1), (Chunk("p", codes) for codes in preset), clone("b", 2),
        strict=True,
    )  # fmt: skip
    ids = ["run-a", "run-p", "run-b"] if of_runner else None
    for chunks in steps:
        mine = stepped(stage.ours, *chunks, request_ids=ids, key=key)
        theirs = stepped(stage.hosts, *chunks, request_ids=ids, key=key)
        for one, other in zip(mine, theirs, strict=True):
            assert one.shape == other.shape and other.std() > 0.01
            assert (one - other).abs().max() < TOLERANCE
    assert set(stage.ours._decoder_state_cache) == set(ids or "apb")
    counts = stage.states.stats(0)
    assert (counts.made, counts.states) == (2, 2)


@pytest.mark.parametrize("of_runner", [True, False], ids=["request_ids", "meta"])
def test_a_voices_second_request_begins_behind_its_state(stage, of_runner):
    [first, *_] = clone("a", 1)
    samples = []
    for name in ("a", "b"):
        first.info["meta"]["request_id"] = name
        ids = [f"run-{name}"] if of_runner else None
        samples += stepped(stage.ours, first, request_ids=ids)
    assert torch.equal(*samples)
    counts = stage.states.stats(0)
    assert (counts.made, counts.hits) == (1, 1)


def test_the_hosts_dummy_run_passes(stage):
    """It brings more requests than spans of ids, and no ids of a runner."""
    for model in (stage.ours, stage.hosts):
        infos = model.get_dummy_runtime_additional_information(4)
        ids = torch.zeros(16 * 8, dtype=torch.long)
        output = model(
            ids, runtime_additional_information=infos, seq_token_counts=[ids.numel()]
        )
        [samples] = output.multimodal_outputs["model_outputs"]
        assert samples.shape == (8 * 1920,)
        assert not model._decoder_state_cache


def test_with_no_bytes_for_states_all_samples_are_the_hosts(stage, monkeypatch):
    monkeypatch.setenv("SPEAKER_CACHE_DECODER_MAX_BYTES", "0")
    without = CachedQwen3TTSCode2Wav(vllm_config=stage.ours.vllm_config)
    without.load_weights(iter(()))
    assert without.tts_cache_decoder_states is None
    for chunk in clone("a", 1):
        [mine], [theirs] = (stepped(model, chunk) for model in (without, stage.hosts))
        assert torch.equal(mine, theirs)


def test_without_memory_for_a_state_a_chunk_is_the_hosts(stage, monkeypatch, caplog):
    monkeypatch.setattr(logs, "INTERVAL_SECONDS", 0.0)  # others said it before
    stepped(stage.ours, clone("other", 9)[0])
    [first, *_] = clone("a", 1)
    [theirs] = stepped(stage.hosts, first)

    def no_memory(*_args, **_more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(stage.ours._prefixes, "_make", no_memory)
        [mine] = stepped(stage.ours, first)
    assert torch.equal(mine, theirs)
    assert stage.states.stats(0).states == 0
    assert "CUDA out of memory" in caplog.text
    stepped(stage.ours, clone("b", 1)[0])
    assert stage.states.stats(0).states == 1


def test_other_weights_delete_the_states_and_ban_no_voice(stage):
    stepped(stage.ours, clone("a", 1)[0])
    stage.ours.load_weights(iter(()))
    assert stage.states.stats(0).states == 0
    stepped(stage.ours, clone("b", 1)[0])
    assert stage.states.stats(0).states == 1
