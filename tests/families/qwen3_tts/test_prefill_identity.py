"""Given the same encodings, our prefill is the host builder's, bit for bit.

Both sides run on the real talker of a tiny checkpoint. The host's side is its own
route for a reference that it knows already: the artifact cache of its prompt builder.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.families.qwen3_tts.case import CASE
from tests.in_process_workers import prepare, ref_of, store_clip
from tests.other_runner import OtherRunner
from tests.real_talker import loaded_talker
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.adapter import Speaker
from vllm_tts_cache.entrypoints.inline import Clip
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.networks.qwen3_codec.frames import num_codec_frames
from vllm_tts_cache.families.qwen3_tts.family import (
    FAMILY,
    HANDED_ON,
    IN_CONTEXT,
    X_VECTOR,
)
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.testing.clips import SPEECH

TEXTS = ("Hi.", "A longer sentence, which has more tokens than the short one. " * 6)
RATES_HZ = (8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000, 96_000, 192_000)
MODES = pytest.mark.parametrize("in_context", [False, True], ids=["x-vector", "icl"])
TEXT_MODES = pytest.mark.parametrize(
    "non_streaming", [False, True], ids=["streaming", "non-streaming"]
)
LANGUAGES = pytest.mark.parametrize("language", [None, "English"])
ARTIFACT = "an artifact of the host"


@pytest.fixture(scope="module")
def talker(qwen3_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("talker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(directory / "samples"))
        with loaded_talker(CASE, qwen3_checkpoint, directory) as model:
            yield model


@pytest.fixture(scope="module")
def audio(talker):
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
    store = open_store(load_settings())
    ref = store_clip(store, audio)
    store.close()
    prepare(talker.tts_cache_speakers, ref, FAMILY.encoders)
    return audio


async def prepared(adapter, audio, *, in_context, non_streaming, language, text):
    """The prompt that the API process sends: placeholder ids and information."""
    from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

    request = OpenAICreateSpeechRequest(
        input=text,
        task_type="Base",
        language=language,
        ref_text=SPEECH.transcript if in_context else None,
        x_vector_only_mode=not in_context,
        non_streaming_mode=non_streaming,
    )
    clip = Clip(
        ref=ref_of(audio),
        num_samples=audio.num_samples,
        sample_rate_hz=audio.sample_rate_hz,
    )
    mode = IN_CONTEXT if in_context else X_VECTOR
    speaker = Speaker(clip=clip, mode=mode, request=request)
    return (await adapter.clone(speaker)).prompt


def merge(buffer, update):
    """As the model runner keeps what `preprocess` returns for the next chunk."""
    for name, value in update.items():
        if isinstance(value, dict):
            merge(buffer.setdefault(name, {}), value)
        else:
            buffer[name] = value


def prefill(preprocess, num_tokens, info, chunk=None, start=0, request_id="request"):
    """Run a prefill in chunks; return its embeddings and what it leaves behind."""
    parts, buffer = [], dict(info)
    while start < num_tokens:
        ids = torch.ones(min(chunk or num_tokens, num_tokens - start), dtype=torch.long)
        _, embeds, update = preprocess(
            ids,
            None,
            **buffer,
            request_id=request_id,
            _omni_is_prefill=True,
            _omni_num_computed_tokens=start,
            _omni_prompt_len=num_tokens,
        )
        parts.append(embeds)
        merge(buffer, update)
        start += ids.numel()
    return torch.cat(parts), buffer


def as_the_host(talker, prompt, audio, *, in_context):
    """The same prefill from the same encodings by nothing but the host's code."""
    from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
        Qwen3TTSTalkerForConditionalGeneration as HostTalker,
    )

    info = dict(prompt["additional_information"])
    del info[FIELD]
    info.pop(HANDED_ON, None)  # the host takes it for a voice of its own
    encoders = talker.tts_cache_speakers._work._encoders
    embedding = encoders["speaker"].encode(audio)["speaker_embedding"]
    codes = encoders["codec"].encode(audio)["codes"]
    talker._prompt_builder.put_ref_audio_artifacts(
        ARTIFACT,
        ref_code=torch.tensor(codes) if in_context else None,
        ref_spk_embedding=torch.tensor(embedding),
    )
    info["_qwen3_tts_ref_audio_cache_key"] = [ARTIFACT]
    preprocess = HostTalker.preprocess.__get__(talker)
    try:
        return prefill(preprocess, len(prompt["prompt_token_ids"]), info)
    finally:
        talker._prompt_builder._ref_audio_artifact_cache.clear()


def assert_same(ours, hosts):
    assert ours.dtype == hosts.dtype
    assert torch.equal(ours, hosts)


@MODES
@TEXT_MODES
@LANGUAGES
@pytest.mark.parametrize("text", TEXTS, ids=["short", "long"])
async def test_a_prefill_is_the_hosts_and_as_long_as_announced(
    talker, adapter, audio, in_context, non_streaming, language, text
):
    prompt = await prepared(
        adapter,
        audio,
        in_context=in_context,
        non_streaming=non_streaming,
        language=language,
        text=text,
    )
    info, num_tokens = prompt["additional_information"], len(prompt["prompt_token_ids"])
    ours, left = prefill(talker.preprocess, num_tokens, info)
    hosts, left_by_host = as_the_host(talker, prompt, audio, in_context=in_context)
    assert left["embed"]["prefill"].shape[0] == num_tokens
    assert_same(ours, hosts)
    for part, name in (("embed", "prefill"), ("hidden_states", "trailing_text")):
        assert_same(left[part][name], left_by_host[part][name])
    assert ("ref" in left["codes"]) is in_context
    if in_context:
        assert_same(left["codes"]["ref"], left_by_host["codes"]["ref"])
        assert left["meta"]["ref_code_len"] == left["codes"]["ref"].shape[0]


@MODES
@pytest.mark.parametrize("chunk", [1, 7, 64])
async def test_a_prefill_in_chunks_is_the_whole_one(
    talker, adapter, audio, in_context, chunk
):
    prompt = await prepared(
        adapter,
        audio,
        in_context=in_context,
        non_streaming=True,
        language=None,
        text=TEXTS[0],
    )
    info, num_tokens = prompt["additional_information"], len(prompt["prompt_token_ids"])
    whole, _ = prefill(talker.preprocess, num_tokens, info)
    chunked, _ = prefill(talker.preprocess, num_tokens, info, chunk)
    assert_same(chunked, whole)


async def test_two_voices_have_different_prefills(talker, adapter, audio):
    reversed_ = ReferenceAudio.of(audio.samples[::-1].copy(), audio.sample_rate_hz)
    other = encoded(talker, reversed_)
    embeds = []
    for voice in (audio, other):
        prompt = await prepared(
            adapter,
            voice,
            in_context=False,
            non_streaming=False,
            language=None,
            text=TEXTS[0],
        )
        num_tokens = len(prompt["prompt_token_ids"])
        info = prompt["additional_information"]
        embeds.append(prefill(talker.preprocess, num_tokens, info)[0])
    assert not torch.equal(*embeds)


async def test_a_prompt_carries_no_waveform(adapter, audio):
    prompt = await prepared(
        adapter,
        audio,
        in_context=True,
        non_streaming=False,
        language=None,
        text=TEXTS[0],
    )
    assert len(repr(prompt["additional_information"])) < 1000


async def test_a_request_without_encodings_is_padded_and_ends_alone(talker):
    """Nothing stores this audio: `preprocess` must not raise, its neighbour goes on."""
    info = {
        FIELD: ["0" * 64, "registered"],
        "text": ["Hi."],
        "task_type": ["Base"],
        "x_vector_only_mode": [True],
    }
    embeds, _ = prefill(talker.preprocess, 12, info, chunk=8)
    pad = talker._tts_pad_embed.reshape(-1).to(torch.bfloat16)
    assert torch.equal(embeds, pad.expand(12, -1))
    try:
        talker.set_batch_req_ids(["neighbour", "request"])
        hidden = torch.randn(2, talker.talker_config.hidden_size, dtype=torch.bfloat16)
        logits = talker.compute_logits(hidden)
        assert logits[1].argmax() == 3071
        assert logits[1].isfinite().sum() == 1
        assert logits[0, 3071] == float("-inf")
        assert logits[0].isfinite().sum() > 1
    finally:
        talker._failed_requests._ids.clear()


async def test_a_prefix_that_a_failed_request_may_have_left_is_not_spoken_with(
    talker, adapter, audio, monkeypatch
):
    """With prefix caching on: scheduled before the scheduler dropped the blocks."""
    prompts = [
        await prepared(
            adapter,
            audio,
            in_context=True,
            non_streaming=True,
            language=None,
            text=text,
        )
        for text in TEXTS
    ]

    def run(request_id, start, prompt=prompts[0]):
        num_tokens = len(prompt["prompt_token_ids"])
        info = prompt["additional_information"]
        return prefill(
            talker.preprocess, num_tokens, info, start=start, request_id=request_id
        )[0]

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
    run("another text in its step", 16, prompts[1])
    fail("failed")
    run("after it in its step", 16)
    end_step()
    run("in the next step", 16)
    run("another text", 16, prompts[1])
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


async def test_prompts_that_differ_in_how_the_text_is_fed_share_no_kv(adapter, audio):
    salts = [
        (
            await prepared(
                adapter,
                audio,
                in_context=True,
                non_streaming=non_streaming,
                language=None,
                text=TEXTS[0],
            )
        )["cache_salt"]
        for non_streaming in (None, False, True, True)
    ]
    assert len(set(salts)) == 3
    assert salts[2] == salts[3]


@pytest.mark.parametrize("chunk", [7, 512])
async def test_the_other_runner_prefills_the_same(talker, adapter, audio, chunk):
    """MRV2, the default on a GPU: two clones and one that fails, in one batch."""
    prompts = [
        await prepared(
            adapter,
            audio,
            in_context=in_context,
            non_streaming=True,
            language=None,
            text=TEXTS[0],
        )
        for in_context in (False, True)
    ]
    lost = {**prompts[0]["additional_information"], FIELD: ["0" * 64, "registered"]}
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
        num_tokens = len(prompt["prompt_token_ids"])
        info = prompt["additional_information"]
        expected, left = prefill(talker.preprocess, num_tokens, info)
        assert_same(found[index], expected)
        for part, name in (("embed", "prefill"), ("hidden_states", "trailing_text")):
            assert_same(runner.left_by(index)[part][name], left[part][name])
    pad = talker._tts_pad_embed.reshape(-1).to(torch.bfloat16)
    assert torch.equal(found[2], pad.expand(len(found[2]), -1))


def boundary_lengths(rate_hz):
    """Samples from 1 to 1.6 s, near whole frames of 80 ms more often than not."""
    frames = st.integers(13, 19).map(lambda n: round(n * rate_hz * 1_920 / 24_000))
    near = st.builds(lambda n, delta: n + delta, frames, st.integers(-3, 3))
    return near | st.integers(rate_hz, round(1.6 * rate_hz))


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), rate_hz=st.sampled_from(RATES_HZ))
def test_the_announced_frames_are_those_of_the_codec(talker, data, rate_hz):
    num_samples = data.draw(boundary_lengths(rate_hz))
    samples = 0.1 * torch.randn(num_samples, generator=torch.Generator().manual_seed(0))
    codec = talker.tts_cache_speakers._work._encoders["codec"]
    codes = codec.encode(ReferenceAudio.of(samples.numpy(), rate_hz))["codes"]
    assert num_codec_frames(num_samples, rate_hz) == codes.shape[0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rate_hz=st.sampled_from(RATES_HZ))
def test_the_announced_frames_follow_the_resampler_up_to_30_seconds(data, rate_hz):
    from vllm_tts_cache.families.networks.resample import resample

    num_samples = data.draw(st.integers(rate_hz, 30 * rate_hz))
    samples = torch.zeros(num_samples).numpy()
    resampled = resample(ReferenceAudio.of(samples, rate_hz), 24_000)
    assert num_codec_frames(num_samples, rate_hz) == -(-resampled.size // 1_920)
