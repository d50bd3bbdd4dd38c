"""Voices of random codes, in the memory of a slow AR in this process."""

import hashlib

import numpy as np
import torch

from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.families.fish_speech.family import CODEC
from vllm_tts_cache.families.fish_speech.prompt import PromptBuilder
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.speaker.ref import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Encoding, EncodingKey

TEXT = "The keeper counts the ships, and then counts them again."
REF_TEXT = "What is said in the reference."


def random_codes(num_frames=70, seed=0):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1_024, (num_frames, 10), dtype=np.int16)
    codes[:, 0] = random.integers(0, 4_096, num_frames)
    return codes


class Voice:
    """Codes in the worker's cache, and what the API process sends to speak by them."""

    def __init__(self, slow_ar, codes, text=TEXT, ref_text=REF_TEXT):
        self.codes = codes
        self.text = text
        self.speakers = slow_ar.tts_cache_speakers
        audio_sha256 = hashlib.sha256(codes.tobytes()).hexdigest()
        self.ref = SpeakerRef(audio_sha256=audio_sha256, segment=Segment.REGISTERED)
        self.key = EncodingKey(
            audio_sha256=audio_sha256,
            encoder_fingerprint=self.speakers.fingerprints[CODEC],
        )
        self.remember(codes)
        builder = PromptBuilder(
            tokenizer=slow_ar._get_tokenizer(),
            first_semantic_id=slow_ar._semantic_begin_id,
        )
        prompt = builder.clone(text, ref_text, self.key, codes)
        self.ids = torch.tensor(prompt.token_ids, dtype=torch.int32)
        self.reference = prompt.reference
        self.info = {
            FIELD: self.ref.to_wire(),
            rows.FIELD: prompt.reference.to_wire(),
        }

    def remember(self, codes):
        self.speakers.delete([self.ref.audio_sha256])
        memory = self.speakers._cache._memory
        encoding, since = Encoding({"codes": codes}), memory.num_deletes
        memory.put(self.key, encoding, Segment.REGISTERED, since=since)
