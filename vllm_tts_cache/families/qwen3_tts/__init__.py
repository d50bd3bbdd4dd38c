"""Qwen3-TTS Base: what it makes of reference audio.

``speaker``
    The ECAPA-TDNN x-vector: ``speaker_embedding``, ``(hidden,)`` float32.
``codec``
    The 12 Hz codec's codes: ``codes``, ``(num_frames, num_codebooks)`` int16, which
    holds any index of its 2048 entries exactly; 12.5 frames a second.

An x-vector clone needs the first; an in-context clone needs both, and the reference
text. What the encodings are is defined by the official package, qwen-tts 0.1.1 in
float32, not by the host's approximation of it: ``tests/contract`` runs both.
"""

from types import MappingProxyType

from vllm_tts_cache.speaker.family import CloneMode, Family

SPEAKER = "speaker"
CODEC = "codec"

FAMILY = Family(
    name="qwen3_tts",
    encoders=MappingProxyType(
        {
            CloneMode.X_VECTOR: (SPEAKER,),
            CloneMode.IN_CONTEXT: (SPEAKER, CODEC),
        }
    ),
)
