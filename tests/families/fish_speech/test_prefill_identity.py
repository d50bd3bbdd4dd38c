"""Given the same codes, our prefill of Fish Speech is the host's, bit for bit.

Both sides run on the real slow AR of a tiny checkpoint. The host's side is its own
route for a voice that it knows already: its speaker cache.
"""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_omni.model_executor.models.fish_speech import dac_encoder
from vllm_omni.model_executor.models.fish_speech import fish_speech_slow_ar as host
from vllm_omni.worker import gpu_model_runner
from vllm_omni.worker_v2.model_states import intermediate_buffer

from tests.families.fish_speech.case import CASE
from tests.families.fish_speech.voices import REF_TEXT, TEXT, Voice, random_codes
from tests.in_process_workers import prepare, ref_of, store_clip
from tests.real_talker import loaded_talker
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.families.fish_speech.family import CODEC, FAMILY
from vllm_tts_cache.families.fish_speech.worker import CachedFishSpeechSlowAR
from vllm_tts_cache.families.networks import rows as reference_rows
from vllm_tts_cache.speaker.ref import FIELD
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.testing.clips import SPEECH

CHUNKS = (1, 7, 16, 64)
ABSENT = "0" * 64
NO_SPEAKER_PROMPT = FAMILY.failure_id


@pytest.fixture(scope="module")
def slow_ar(fish_speech_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("slow-ar")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(directory / "samples"))
        with loaded_talker(CASE, fish_speech_checkpoint, directory) as model:
            yield model


@pytest.fixture(autouse=True)
def nothing_failed_before(slow_ar):
    slow_ar._failed_requests._ids.clear()


@pytest.fixture
def voice(slow_ar):
    return Voice(slow_ar, random_codes())


def preprocess(slow_ar, ids, info, start, prompt_len, **others):
    return slow_ar.preprocess(
        ids,
        None,
        **{"request_id": "request", **info, **others},
        _omni_is_prefill=True,
        _omni_num_computed_tokens=start,
        _omni_prompt_len=prompt_len,
    )


def prefill(slow_ar, ids, info, *, chunk=None, start=0, **others):
    """The rows of a prefill from ``start`` on, in chunks."""
    parts = []
    while start < len(ids):
        part = ids[start : start + (chunk or len(ids))]
        out, rows, update = preprocess(slow_ar, part, info, start, len(ids), **others)
        assert torch.equal(out, part)
        codes = update["codes"]["audio"]
        assert (codes.device.type, codes.dtype) == ("cpu", torch.long)
        assert codes.shape == (len(part), 10)
        assert not codes.any()
        parts.append(rows)
        start += len(part)
    return torch.cat(parts)


def as_the_host(slow_ar, voice):
    """The same prefill from the same codes by nothing but the host's code."""
    cache, name = slow_ar._speaker_cache, voice.ref.audio_sha256
    key = cache.make_cache_key(name, model_type="fish_speech", created_at=1)
    cache.put(key, {"ref_codes_fq": torch.tensor(voice.codes).long()})
    return slow_ar._build_structured_voice_clone_prefill_embeds(
        {
            "text": voice.text,
            "ref_text": REF_TEXT,
            "voice_name": name,
            "voice_created_at": 1,
        }
    )


def assert_same(ours, hosts):
    assert ours.dtype == hosts.dtype == torch.bfloat16
    assert torch.equal(ours, hosts)


def num_failed(slow_ar):
    return slow_ar.tts_cache_speakers.stats().failed_prompts


def test_the_registered_model_is_ours_and_no_encoder_of_the_hosts_is_loaded(slow_ar):
    assert type(slow_ar) is CachedFishSpeechSlowAR
    assert dac_encoder._codec_cache == {}


def test_a_prefill_is_the_hosts(slow_ar, voice):
    rows = prefill(slow_ar, voice.ids, voice.info)
    assert len(rows) == len(voice.ids)
    assert_same(rows, as_the_host(slow_ar, voice))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prefill_in_chunks_is_the_hosts(slow_ar, voice, chunk):
    rows = prefill(slow_ar, voice.ids, voice.info, chunk=chunk)
    assert_same(rows, as_the_host(slow_ar, voice))


def test_a_last_chunk_of_one_token_is_still_prefill(slow_ar, voice):
    rows = prefill(slow_ar, voice.ids, voice.info, chunk=len(voice.ids) - 1)
    assert_same(rows, as_the_host(slow_ar, voice))


@pytest.mark.parametrize("offset", [-1, 0, 1, 69])
def test_a_prefill_that_resumes_at_the_reference_is_the_rest_of_the_hosts(
    slow_ar, voice, offset
):
    start = voice.reference.start + offset
    rows = prefill(slow_ar, voice.ids, voice.info, start=start)
    assert_same(rows, as_the_host(slow_ar, voice)[start:])


def test_a_prefill_from_real_audio_is_the_hosts(slow_ar):
    audio = decode_path(SPEECH.path).audio
    store = open_store(load_settings())
    store_clip(store, audio)
    store.close()
    speakers = slow_ar.tts_cache_speakers
    prepare(speakers, ref_of(audio), (CODEC,))
    codes = speakers.prompt(ref_of(audio), (CODEC,))[CODEC]["codes"]
    voice = Voice(slow_ar, np.array(codes))
    info = {**voice.info, FIELD: ref_of(audio).to_wire()}
    assert_same(
        prefill(slow_ar, voice.ids, info, chunk=64), as_the_host(slow_ar, voice)
    )


@pytest.mark.parametrize("chunk", [None, *CHUNKS])
def test_a_prefill_without_a_speaker_is_the_hosts(slow_ar, chunk):
    ids = torch.tensor(slow_ar._get_tokenizer().encode(TEXT), dtype=torch.int32)
    hosts = slow_ar._build_prefill_embeds(ids, {})
    assert_same(prefill(slow_ar, ids, {}, chunk=chunk), hosts)


def test_a_span_behind_the_reference_asks_for_no_encoding(slow_ar, voice):
    expected = as_the_host(slow_ar, voice)
    voice.speakers.delete([voice.ref.audio_sha256])
    before = num_failed(slow_ar)
    behind = voice.reference.start + voice.reference.num_rows
    rows = prefill(slow_ar, voice.ids, voice.info, start=behind)
    assert_same(rows, expected[behind:])
    head = preprocess(
        slow_ar,
        voice.ids[: voice.reference.start],
        voice.info,
        0,
        len(voice.ids),
    )[1]
    assert_same(head, expected[: voice.reference.start])
    assert num_failed(slow_ar) == before


def test_voices_that_differ_in_residual_codes_only_have_different_rows(slow_ar, voice):
    other_codes = random_codes(seed=1)
    other_codes[:, 0] = voice.codes[:, 0]
    other = Voice(slow_ar, other_codes)
    assert torch.equal(voice.ids, other.ids)
    ours = prefill(slow_ar, voice.ids, voice.info)
    theirs = prefill(slow_ar, other.ids, other.info)
    differs = (ours != theirs).any(dim=1).nonzero().flatten()
    start, num_frames, _ = voice.reference.to_wire()
    assert differs.tolist() == list(range(start, start + num_frames))


def test_decoding_is_the_hosts(slow_ar):
    token = torch.tensor([slow_ar._semantic_begin_id + 7], dtype=torch.int32)
    last = torch.randn(256, dtype=torch.bfloat16)
    _, row, update = slow_ar.preprocess(
        token,
        None,
        request_id="request",
        hidden_states={"last": last},
        _omni_is_prefill=False,
    )
    assert_same(row, slow_ar.embed_input_ids(token).bfloat16())
    assert torch.equal(update["mtp_inputs"][0].flatten(), last)


def test_a_clone_request_of_the_hosts_own_shape_is_left_to_the_host(slow_ar):
    ids = torch.ones(8, dtype=torch.int32)
    with pytest.raises(ValueError, match="string text and ref_text"):
        preprocess(slow_ar, ids, {"fish_structured_voice_clone": True}, 0, 8)


# Requests that fail alone


def forced(slow_ar, *request_ids):
    """Which of these requests can sample only the id that ends them as an error."""
    slow_ar.set_batch_req_ids(request_ids)
    hidden = torch.randn(len(request_ids), 256, dtype=torch.bfloat16)
    logits = slow_ar.compute_logits(hidden)
    return [rid for rid, row in zip(request_ids, logits, strict=True) if ended(row)]


def ended(row):
    return row.isfinite().nonzero().flatten().tolist() == [FAMILY.failure_id]


def absent(info):
    return {**info, FIELD: [ABSENT, "registered"]}


def other_frames(info):
    start, num_frames, checksum = info[reference_rows.FIELD]
    return {**info, reference_rows.FIELD: [start, num_frames - 1, checksum]}


@pytest.mark.parametrize(
    "spoil",
    [
        absent,
        other_frames,
        lambda info: {FIELD: info[FIELD]},
        lambda info: {**info, reference_rows.FIELD: [-1, 70, 0]},
        lambda info: {**info, reference_rows.FIELD: "0"},
        lambda info: {**info, FIELD: ["no address", "registered"]},
        lambda info: {**info, FIELD: None},
    ],
    ids=[
        "no-encoding",
        "other-number-of-frames",
        "no-frames",
        "negative-frames",
        "text-for-frames",
        "no-address",
        "no-speaker",
    ],
)
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_request_that_cannot_be_prefilled_fails_alone(slow_ar, voice, spoil, chunk):
    before = num_failed(slow_ar)
    prefill(slow_ar, voice.ids, spoil(voice.info), chunk=chunk)
    prefill(slow_ar, voice.ids, voice.info, request_id="neighbour")
    assert num_failed(slow_ar) == before + 1
    assert forced(slow_ar, "neighbour", "request", "other") == ["request"]


@pytest.mark.parametrize(
    "codes",
    [
        random_codes(69),
        random_codes()[:, :9],
        random_codes() - 4_096,
        random_codes() + 4_096,
    ],
    ids=["a-frame-less", "a-codebook-less", "negative", "past-the-codebook"],
)
def test_codes_that_do_not_fit_the_prompt_fail_their_request(slow_ar, voice, codes):
    voice.remember(codes)
    prefill(slow_ar, voice.ids, voice.info)
    assert forced(slow_ar, "neighbour", "request") == ["request"]


def behind(slow_ar, voice, info, request_id):
    """Prefill as after a hit in the KV that covers the whole reference."""
    start, num_frames, _ = voice.info[reference_rows.FIELD]
    begin = start + num_frames
    preprocess(
        slow_ar,
        voice.ids[begin:],
        {**info, "request_id": request_id},
        begin,
        len(voice.ids),
    )


def test_a_prefix_that_a_failed_request_may_have_left_is_not_spoken_with(
    slow_ar, voice
):
    """Scheduled before the scheduler dropped it: without this, nobody's voice."""
    prefill(slow_ar, voice.ids, voice.info, request_id="first")
    behind(slow_ar, voice, voice.info, "before")
    assert forced(slow_ar, "before") == []  # its step ends
    behind(slow_ar, voice, voice.info, "before it in its step")
    voice.remember(random_codes(69))  # not what the prompt was made for
    prefill(slow_ar, voice.ids, voice.info, request_id="failed")
    behind(slow_ar, voice, voice.info, "after")
    voice.remember(random_codes())
    behind(slow_ar, voice, voice.info, "still")
    prefill(slow_ar, voice.ids, voice.info, request_id="whole")
    behind(slow_ar, voice, voice.info, "again")
    late = ("before it in its step", "failed", "after", "still")
    names = ("before", *late, "whole", "again")
    assert forced(slow_ar, *names) == [*late]


def test_what_fails_behind_its_codes_leaves_its_prefix_suspect(
    slow_ar, voice, monkeypatch
):
    def full(_rows):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(slow_ar.codebook_embeddings, "forward", full)
        prefill(slow_ar, voice.ids, voice.info, request_id="lacks room")
    behind(slow_ar, voice, voice.info, "behind it")
    names = ("lacks room", "behind it")
    assert forced(slow_ar, *names) == [*names]
    prefill(slow_ar, voice.ids, voice.info, request_id="clears it")


def test_a_prefix_is_suspect_with_its_transcript_alone(slow_ar, voice):
    """Another transcript has other KV, under a salt of its own: both ways."""
    other = Voice(slow_ar, random_codes(), ref_text="What another has heard.")
    assert other.ref == voice.ref
    voice.remember(random_codes(69))
    prefill(slow_ar, voice.ids, voice.info, request_id="failed")
    voice.remember(random_codes())
    behind(slow_ar, other, other.info, "of the other")
    prefill(slow_ar, other.ids, other.info, request_id="whole other")
    behind(slow_ar, voice, voice.info, "after")
    names = ("failed", "of the other", "whole other", "after")
    assert forced(slow_ar, *names) == ["failed", "after"]
    prefill(slow_ar, voice.ids, voice.info, request_id="clears it")


def test_nothing_else_can_sample_the_id_that_ends_a_request(slow_ar):
    assert not slow_ar._semantic_allowed_mask[FAMILY.failure_id]
    assert slow_ar._semantic_allowed_mask.sum() == 4_096 + 1
    logits = slow_ar.compute_logits(torch.randn(3, 256, dtype=torch.bfloat16))
    assert (logits[:, FAMILY.failure_id] == float("-inf")).all()


def test_the_other_runner_names_a_request_and_its_rows_in_its_own_way(slow_ar, voice):
    info = {**absent(voice.info), "req_id": "mine"}
    slow_ar.preprocess(
        voice.ids, None, **info, _omni_is_prefill=True, _omni_num_computed_tokens=0
    )
    hidden = torch.randn(2, 256, dtype=torch.bfloat16)
    counts = torch.zeros(2, dtype=torch.long)
    with slow_ar.mrv2_sampling_context(
        req_ids=["mine", "neighbour"], num_output_tokens=counts
    ):
        logits = slow_ar.compute_logits(hidden)
    assert [ended(row) for row in logits] == [True, False]
    # What is computed outside of sampling, log-probabilities of a prompt, stays.
    assert not any(ended(row) for row in slow_ar.compute_logits(hidden))


@pytest.mark.parametrize("is_other_runner", [True, False])
def test_only_the_other_runner_is_asked_to_name_the_rows(monkeypatch, is_other_runner):
    """The v1 runner would gather all output ids in each step for the same flag."""
    host_class = host.FishSpeechSlowARForConditionalGeneration
    monkeypatch.setattr(
        host_class, "__init__", lambda self, **_: torch.nn.Module.__init__(self)
    )
    model_config = SimpleNamespace(use_v2_model_runner=is_other_runner)
    model = CachedFishSpeechSlowAR(
        vllm_config=SimpleNamespace(model_config=model_config)
    )
    asks = getattr(model, "logitsprocs_need_output_token_ids", False)
    assert asks is is_other_runner


def test_seam_the_runners_name_a_request_as_we_read_it():
    v1 = inspect.getsource(gpu_model_runner.OmniGPUModelRunner._preprocess)
    assert 'req_infos["request_id"] = req_id' in v1
    other = inspect.getsource(intermediate_buffer.OmniIntermediateBuffer.add_request)
    assert 'info["req_id"] = new_req_data.req_id' in other
