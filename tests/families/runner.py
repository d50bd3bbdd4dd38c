"""How the host's v1 runner asks a talker for rows, and keeps what it leaves."""

from typing import Any

import numpy as np
import torch
from vllm_omni.data_entry_keys import flatten_payload
from vllm_omni.utils.mm_outputs import build_mm_cpu
from vllm_omni.worker.output.payload_build import build_omni_mm_payload

from tests.in_process_workers import SECRET, prepare, ref_of, store_clip
from vllm_tts_cache.audio.reference import ReferenceAudio, Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.speakers.inline import Clip
from vllm_tts_cache.families.networks.prompts import ReferenceRows
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_store

ABSENT = "0" * 64
# Of a request whose prompt cannot be had.
_ABSENT_REF = SpeakerRef(audio_sha256=ABSENT, segment=Segment.REGISTERED)
UNKNOWN: dict[str, Any] = {FIELD: _ABSENT_REF.signed(SECRET, "").to_wire()}
UNNAMED = {
    "no-encoding": UNKNOWN,
    "not-signed": {FIELD: _ABSENT_REF.signed(b"guessed", "").to_wire()},
    "no-address": {FIELD: ["no address", "registered", "", ""]},
    "no-speaker": {FIELD: None},
}


class StoredVoice:
    """A clip whose encodings are in the worker's memory."""

    def __init__(self, speakers, samples, rate_hz, encoders):
        samples = np.ascontiguousarray(samples, np.float32)
        self.audio = ReferenceAudio.of(samples, rate_hz)
        self.num_samples, self.sample_rate_hz = len(samples), rate_hz
        self.ref, self.speakers = ref_of(self.audio), speakers
        store = open_store(load_settings())
        store_clip(store, self.audio)
        store.close()
        prepare(speakers, self.ref, encoders)
        self.encodings = speakers.prompt(self.ref, encoders)

    def remember(self, **arrays):
        """Have the memory hold these instead, by encoder and name."""
        remember(self.speakers, self.ref, **arrays)


class PromptedVoice(StoredVoice):
    """A clip that one codec encodes, and the prompt that ``prompted`` makes of it."""

    def __init__(self, talker, samples, rate_hz, codec, prompted):
        super().__init__(talker.tts_cache_speakers, samples, rate_hz, (codec,))
        self.codes = self.encodings[codec]["codes"]
        made = prompted(self)
        self.ids = torch.tensor(made["prompt_token_ids"])
        self.info = {**made["additional_information"], "generated_len": 0}
        self.where = ReferenceRows.from_info(self.info)


def clip_of(audio):
    """What a prompt is built for of a clip."""
    num_samples, rate_hz = audio.num_samples, audio.sample_rate_hz
    return Clip(ref=ref_of(audio), num_samples=num_samples, sample_rate_hz=rate_hz)


def remember(speakers, ref, **arrays):
    """Have a worker's memory hold these of a clip, by encoder and name."""
    speakers.delete([ref.audio_sha256])
    memory = speakers._cache.memory
    for encoder, kept in arrays.items():
        key = EncodingKey(
            audio_sha256=ref.audio_sha256,
            encoder_fingerprint=speakers.fingerprints[encoder],
        )
        contiguous = {name: np.ascontiguousarray(each) for name, each in kept.items()}
        encoding, since = Encoding(contiguous), memory.num_deletes
        memory.put(key, encoding, Segment.REGISTERED, since=since)


def num_failed(talker):
    return talker.tts_cache_speakers.stats().failed_prompts


@torch.inference_mode()
def forced(talker, failure_id, hidden_size, names, dtype=torch.bfloat16):
    """Which of these requests can sample only the id that ends them as an error."""
    talker.set_batch_req_ids(names)
    hidden = torch.randn(len(names), hidden_size).to(dtype)
    logits = talker.compute_logits(hidden)
    return [
        name
        for name, row in zip(names, logits, strict=True)
        if row.isfinite().nonzero().flatten().tolist() == [failure_id]
    ]


def forced_ids(talker, failure_id, names):
    """Who is given that id in the place of one that a model has sampled itself."""
    sampled = torch.full((len(names), 1), failure_id + 1)
    talker._failed_requests.force(sampled, names)
    return [n for n, (got,) in zip(names, sampled, strict=True) if got == failure_id]


def as_the_runner_says(name, num_computed, prompt_len) -> dict[str, Any]:
    """What it adds to a request's information."""
    return {
        "request_id": name,
        "_omni_is_prefill": num_computed < prompt_len,
        "_omni_num_computed_tokens": num_computed,
        "_omni_prompt_len": prompt_len,
    }


def merge(buffer, update, resident=(), part=None):
    """As it keeps what a request's `preprocess` gives it: some of it on the device."""
    for name, value in update.items():
        if isinstance(value, dict):
            merge(buffer.setdefault(name, {}), value, resident, name)
        elif torch.is_tensor(value) and (part, name) not in resident:
            buffer[name] = value.cpu()
        else:
            buffer[name] = value


@torch.inference_mode()
def prefill(preprocess, ids, info, *, chunk=None, start=0, name="request"):
    """The rows of a prompt from ``start`` on, and what the request has kept then."""
    parts, buffer = [], dict(info)
    resident = getattr(preprocess.__self__, "gpu_resident_buffer_keys", ())
    while start < len(ids):
        span = ids[start : start + (chunk or len(ids))]
        told = {**buffer, **as_the_runner_says(name, start, len(ids))}
        given, rows, update = preprocess(span, None, **told)
        assert len(given) == len(rows) == len(span)
        parts.append(rows)
        merge(buffer, update, resident)
        start += len(span)
    return torch.cat(parts), buffer


def parts_of(outputs, counts):
    """What the runner makes of a step's outputs for each request, of so many rows."""
    whole, ends = build_mm_cpu(flatten_payload(outputs)), np.cumsum(counts)
    return [
        build_omni_mm_payload(
            combined_multimodal_outputs=None,
            mm_cpu=whole,
            rid=str(index),
            idx=index,
            start=int(end - count),
            end=int(end),
            audio_sparse_output=False,
            sparse_mm_index={},
            hidden_seq_len=int(ends[-1]),
            scheduled_seq_len=int(ends[-1]),
        )
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]
