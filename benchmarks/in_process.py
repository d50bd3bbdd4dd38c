"""A worker's speaker side in this process, with encoders that cost next to nothing."""

import hashlib

import numpy as np
import torch

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.config import Settings
from vllm_tts_cache.model_executor.speakers import WorkerSpeakers
from vllm_tts_cache.store.audio_wiring import open_audio
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import Encoding

SAMPLE_RATE_HZ = 8_000


class RepeatingEncoder:
    """``values``, ``(num_values,)`` float32: the first samples, over and over."""

    def __init__(self, name: str, num_values: int):
        self.name = name
        self.fingerprint = hashlib.sha256(name.encode()).hexdigest()
        self._num_values = num_values

    def encode(self, audio: ReferenceAudio) -> Encoding:
        return Encoding({"values": np.resize(audio.samples[:64], self._num_values)})


def worker_speakers(
    settings: Settings, cache: EncodingCache, encoders: tuple[RepeatingEncoder, ...]
) -> WorkerSpeakers:
    return WorkerSpeakers(
        encoders={encoder.name: encoder for encoder in encoders},
        cache=cache,
        audio=open_audio(settings),
        device=torch.device("cpu"),
        encode_timeout_seconds=30.0,
        encode_yield_seconds=settings.encode_yield_seconds,
    )


def noise(seed: int, seconds: float = 1.0) -> ReferenceAudio:
    """A clip unlike that of any other seed."""
    samples = np.random.default_rng(seed).standard_normal(
        round(seconds * SAMPLE_RATE_HZ)
    )
    return ReferenceAudio.of((0.1 * samples).astype(np.float32), SAMPLE_RATE_HZ)
