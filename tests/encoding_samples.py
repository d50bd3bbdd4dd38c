"""Keys and encodings for tests; one key always has the same encoding."""

import hashlib

import numpy as np

from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.store.cache import Budget
from vllm_tts_cache.store.encoding import Encoding, EncodingKey

REGISTERED, INLINE = Segment.REGISTERED, Segment.INLINE
ROOMY = {segment: Budget(1 << 20) for segment in Segment}


def make_key(audio: int | str = 0, encoder: int | str = 0) -> EncodingKey:
    return EncodingKey(
        audio_sha256=hashlib.sha256(f"audio {audio}".encode()).hexdigest(),
        encoder_fingerprint=hashlib.sha256(f"encoder {encoder}".encode()).hexdigest(),
    )


def make_encoding(seed: int = 0, num_frames: int = 4) -> Encoding:
    random = np.random.default_rng(seed)
    return Encoding(
        {
            "codes": random.integers(0, 1024, (num_frames, 2), dtype=np.int32),
            "embedding": random.standard_normal(8).astype(np.float32),
        }
    )


def sized_encoding(num_bytes: int) -> Encoding:
    return Encoding({"x": np.zeros(num_bytes, np.uint8)})


def assert_same(one: Encoding | None, other: Encoding | None) -> None:
    assert one is not None
    assert other is not None
    assert list(one.arrays) == list(other.arrays)
    for name, array in one.arrays.items():
        assert array.dtype == other[name].dtype
        assert array.shape == other[name].shape
        assert array.tobytes() == other[name].tobytes()


def is_free(turns, key):
    with turns.turn(key) as is_mine:
        return is_mine
