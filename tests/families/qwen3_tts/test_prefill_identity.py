"""Given the same encodings, our prefill is the host builder's, bit for bit.

Both sides run on the real talker of a tiny checkpoint. The host's side is its own
route for a reference that it knows already: the artifact cache of its prompt builder.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.families.runner import UNKNOWN, StoredVoice, clip_of, forced
from tests.families.runner import prefill as by_the_runner
from tests.other_runner import OtherRunner
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.entrypoints.serving.adapter import Speaker
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.qwen3_tts.family import (
    FAMILY,
    HANDED_ON,
    IN_CONTEXT,
    X_VECTOR,
)
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.testing.clips import SPEECH

TEXTS = ("Hi.", "A longer sentence, which has more tokens than the short one. " * 6)
MODES = pytest.mark.parametrize("in_context", [False, True], ids=["x-vector", "icl"])
SAID = [
    {"non_streaming_mode": is_whole, "language": language, "input": text}
    for is_whole in (False, True)
    for language in (None, "English")
    for text in TEXTS
]
ARTIFACT = "an artifact of the host"


@pytest.fixture(scope="module")
def voice(talker):
    return encoded(talker, decode_path(SPEECH.path).audio)


@pytest.fixture(scope="module")
def adapter(talker):
    from vllm_tts_cache.families.qwen3_tts.adapter import CachedQwen3TTSAdapter

    server = SimpleNamespace(_tts_tokenizer=None)
    model_config = talker.vllm_config.model_config
    engine_client = SimpleNamespace(model_config=model_config, stage_configs=())
    context: Any = SimpleNamespace(server=server, engine_client=engine_client)
    return CachedQwen3TTSAdapter(context)


def encoded(talker, audio):
    speakers, rate_hz = talker.tts_cache_speakers, audio.sample_rate_hz
    return StoredVoice(speakers, audio.samples, rate_hz, FAMILY.encoders)


async def prepared(adapter, voice, *, in_context=True, **said):
    """The prompt that the API process sends: placeholder ids and information."""
    from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

    request = OpenAICreateSpeechRequest(
        task_type="Base",
        ref_text=SPEECH.transcript if in_context else None,
        x_vector_only_mode=not in_context,
        **{"input": TEXTS[0], "non_streaming_mode": True, **said},
    )
    mode = IN_CONTEXT if in_context else X_VECTOR
    speaker = Speaker(clip=clip_of(voice.audio), mode=mode, request=request)
    return (await adapter.clone(speaker)).prompt


def prefill(preprocess, prompt, *, chunk=None, start=0, request_id="request", **told):
    """Run a prefill in chunks; return its embeddings and what it leaves behind."""
    ids = torch.ones(len(prompt["prompt_token_ids"]), dtype=torch.long)
    info = {**prompt["additional_information"], **told}
    return by_the_runner(
        preprocess, ids, info, chunk=chunk, start=start, name=request_id
    )


def as_the_host(talker, prompt, voice, *, in_context):
    """The same prefill from the same encodings by nothing but the host's code."""
    from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
        Qwen3TTSTalkerForConditionalGeneration as HostTalker,
    )

    info = dict(prompt["additional_information"])
    del info[FIELD]
    info.pop(HANDED_ON, None)  # the host takes it for a voice of its own
    embedding = voice.encodings["speaker"]["speaker_embedding"]
    codes = voice.encodings["codec"]["codes"]
    talker._prompt_builder.put_ref_audio_artifacts(
        ARTIFACT,
        ref_code=torch.tensor(codes) if in_context else None,
        ref_spk_embedding=torch.tensor(embedding),
    )
    info["_qwen3_tts_ref_audio_cache_key"] = [ARTIFACT]
    preprocess = HostTalker.preprocess.__get__(talker)
    try:
        return prefill(preprocess, {**prompt, "additional_information": info})
    finally:
        talker._prompt_builder._ref_audio_artifact_cache.clear()


def assert_same(ours, hosts):
    assert ours.dtype == hosts.dtype
    assert torch.equal(ours, hosts)


@MODES
@pytest.mark.parametrize("said", SAID)
async def test_a_prefill_is_the_hosts_and_as_long_as_announced(
    talker, adapter, voice, in_context, said
):
    prompt = await prepared(adapter, voice, in_context=in_context, **said)
    ours, left = prefill(talker.preprocess, prompt)
    hosts, left_by_host = as_the_host(talker, prompt, voice, in_context=in_context)
    assert left["embed"]["prefill"].shape[0] == len(prompt["prompt_token_ids"])
    assert_same(ours, hosts)
    for part, name in (("embed", "prefill"), ("hidden_states", "trailing_text")):
        assert_same(left[part][name], left_by_host[part][name])
    assert ("ref" in left["codes"]) is in_context
    if in_context:
        assert_same(left["codes"]["ref"], left_by_host["codes"]["ref"])
        assert left["meta"]["ref_code_len"] == left["codes"]["ref"].shape[0]


@MODES
@pytest.mark.parametrize("chunk", [1, 7, 64])
async def test_in_chunks_it_is_the_whole_one(talker, adapter, voice, in_context, chunk):
    prompt = await prepared(adapter, voice, in_context=in_context)
    whole, _ = prefill(talker.preprocess, prompt)
    chunked, _ = prefill(talker.preprocess, prompt, chunk=chunk)
    assert_same(chunked, whole)


async def test_a_request_without_encodings_is_padded_and_ends_alone(talker):
    """Nothing stores this audio: `preprocess` must not raise, its neighbour goes on."""
    info = {
        **UNKNOWN,
        "text": ["Hi."],
        "task_type": ["Base"],
        "x_vector_only_mode": [True],
    }
    prompt = {"prompt_token_ids": [1] * 12, "additional_information": info}
    embeds, _ = prefill(talker.preprocess, prompt, chunk=8)
    pad = talker._tts_pad_embed.reshape(-1).to(torch.bfloat16)
    assert torch.equal(embeds, pad.expand(12, -1))
    size, names = talker.talker_config.hidden_size, ["neighbour", "request"]
    try:
        assert forced(talker, 3_071, size, names) == ["request"]
    finally:
        talker._failed_requests._ids.clear()
    logits = talker.compute_logits(torch.randn(1, size, dtype=torch.bfloat16))
    assert logits[0, 3_071] == float("-inf")
    assert logits[0].isfinite().sum() > 1


async def test_a_prefix_that_may_be_of_a_failure_is_not_spoken_with(
    talker, adapter, voice, monkeypatch
):
    """With prefix caching on: scheduled before the scheduler dropped the blocks."""
    prompt, other = [await prepared(adapter, voice, input=text) for text in TEXTS]

    def run(request_id, start, prompt=prompt):
        return prefill(talker.preprocess, prompt, start=start, request_id=request_id)[0]

    def fail(request_id):
        with monkeypatch.context() as patch:
            patch.setattr(talker.tts_cache_speakers, "prompt", refuse)
            run(request_id, 0)

    def refuse(*_):
        raise EncodeError("not stored")

    def end_step():
        talker.compute_logits(
            torch.zeros(1, talker.talker_config.hidden_size).bfloat16()
        )

    whole = run("first", 0)
    assert_same(run("hit", 16), whole[16:])
    end_step()
    # MRV2 puts the shorter span before the longer one that computes what it found.
    run("before it in its step", 16)
    run("another text in its step", 16, other)
    fail("failed")
    run("after it in its step", 16)
    end_step()
    run("in the next step", 16)
    run("another text", 16, other)
    run("whole", 0)
    assert_same(run("hit again", 16), whole[16:])
    failed = set(talker._failed_requests._ids)
    talker._failed_requests._ids.clear()
    assert failed == {
        "failed",
        "before it in its step",
        "after it in its step",
        "in the next step",
    }


async def test_prompts_that_differ_in_how_the_text_is_fed_share_no_kv(adapter, voice):
    salts = [
        (await prepared(adapter, voice, non_streaming_mode=is_whole))["cache_salt"]
        for is_whole in (None, False, True, True)
    ]
    assert len(set(salts)) == 3
    assert salts[2] == salts[3]


@pytest.mark.parametrize("chunk", [7, 512])
async def test_the_other_runner_prefills_the_same(talker, adapter, voice, chunk):
    """MRV2, the default on a GPU: two clones and one that fails, in one batch."""
    prompts = [
        await prepared(adapter, voice, in_context=in_context)
        for in_context in (False, True)
    ]
    lost = {**prompts[0]["additional_information"], **UNKNOWN}
    prompts.append({**prompts[0], "additional_information": lost})
    runner = OtherRunner(talker)
    for index, prompt in enumerate(prompts):
        ids = torch.tensor(prompt["prompt_token_ids"])
        runner.add(index, f"mrv2-{index}", ids, prompt["additional_information"])
    try:
        found = runner.prefill(chunk)
        assert "mrv2-2" in talker._failed_requests
        assert "mrv2-1" not in talker._failed_requests
    finally:
        talker._failed_requests._ids.clear()
    for index, prompt in enumerate(prompts[:2]):
        expected, left = prefill(talker.preprocess, prompt)
        assert_same(found[index], expected)
        for part, name in (("embed", "prefill"), ("hidden_states", "trailing_text")):
            assert_same(runner.left_by(index)[part][name], left[part][name])
    pad = talker._tts_pad_embed.reshape(-1).to(torch.bfloat16)
    assert torch.equal(found[2], pad.expand(len(found[2]), -1))
