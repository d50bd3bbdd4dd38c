"""Clips whose encodings are in a worker's memory, and what the API process sends."""

import numpy as np
import torch

from tests.audio_clips import voiced
from tests.in_process_workers import prepare, ref_of, store_clip
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, MEL, SPEAKER, TOKENS
from vllm_tts_cache.families.cosyvoice3.positions import num_used_tokens, used_tokens
from vllm_tts_cache.families.cosyvoice3.prompt import PromptBuilder, texts_of
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_store

RATE_HZ = 24_000
TEXT = "The keeper counts the ships, and then counts them again."
TRANSCRIPT = "What is said in the reference. 你好"
INSTRUCTIONS = "Please speak as softly as you can."


class Voice:
    """A clip whose encodings are in the worker's memory."""

    def __init__(self, talker, seconds=3.3, pitch_hz=220.0):
        samples = voiced(RATE_HZ, seconds, pitch_hz=pitch_hz)[:, 0]
        self.audio = ReferenceAudio.of(samples, RATE_HZ)
        self.ref = ref_of(self.audio)
        self.speakers = talker.tts_cache_speakers
        self.num_tokens = num_used_tokens(self.audio.num_samples, RATE_HZ)
        store = open_store(load_settings())
        store_clip(store, self.audio)
        store.close()
        prepare(self.speakers, self.ref, FAMILY.encoders)
        found = self.speakers.prompt(self.ref, FAMILY.encoders)
        self.tokens, self.mel, self.vector = (
            found[name][name] for name in (TOKENS, MEL, SPEAKER)
        )
        assert self.num_tokens == used_tokens(len(self.tokens), len(self.mel))

    def used(self):
        """What the decoder is to be told, under the host's names."""
        n = self.num_tokens
        return {
            "speech_token": torch.tensor(self.tokens[:n], dtype=torch.int32)[None],
            "speech_feat": torch.tensor(self.mel[: 2 * n])[None],
            "embedding": torch.tensor(self.vector)[None],
        }

    def remember(self, **arrays):
        """Have the worker's memory hold these arrays instead, by encoder."""
        kept = {TOKENS: self.tokens, MEL: self.mel, SPEAKER: self.vector, **arrays}
        self.speakers.delete([self.ref.audio_sha256])
        memory = self.speakers._cache._memory
        for name, array in kept.items():
            key = EncodingKey(
                audio_sha256=self.ref.audio_sha256,
                encoder_fingerprint=self.speakers.fingerprints[name],
            )
            encoding = Encoding({name: np.ascontiguousarray(array)})
            memory.put(key, encoding, Segment.REGISTERED, since=memory.num_deletes)


class Prompts:
    """Builds what the API process sends to speak with a voice."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self._builder = PromptBuilder(tokenizer)

    def __call__(self, voice, mode, text=TEXT, *, num_tokens=None):
        texts = texts_of(mode, text, transcript=TRANSCRIPT, instructions=INSTRUCTIONS)
        return self._builder.clone(
            texts,
            mode=mode,
            ref=voice.ref,
            num_tokens=voice.num_tokens if num_tokens is None else num_tokens,
        )


def merge(buffer, update):
    """As the runner keeps what a request's `preprocess` gives it."""
    for name, value in update.items():
        if isinstance(value, dict):
            merge(buffer.setdefault(name, {}), value)
        else:
            buffer[name] = value


class Request:
    """What the v1 runner keeps of a request, and how it asks for its rows."""

    def __init__(self, name, prompt):
        self.name = name
        self.num_tokens = len(prompt["prompt_token_ids"])
        self.info = dict(prompt["additional_information"])
        self.num_computed = 0

    @torch.inference_mode()
    def step(self, talker, num_tokens=None, ids=None):
        """The rows of a span: of the whole prompt, unless told otherwise."""
        if num_tokens is None:
            num_tokens = self.num_tokens
        if ids is None:
            ids = torch.ones(num_tokens, dtype=torch.int32)
        self.info |= {
            "request_id": self.name,
            "_omni_prompt_len": self.num_tokens,
            "_omni_num_computed_tokens": self.num_computed,
            "_omni_is_prefill": self.num_computed < self.num_tokens,
        }
        found, rows, update = talker.preprocess(ids, None, **self.info)
        assert torch.equal(found, ids) and len(rows) == len(ids)
        merge(self.info, update)
        self.num_computed += len(ids)
        return rows
