"""What the encodings of CosyVoice3 depend on."""

from tests.families.cases import Identity
from vllm_tts_cache.families.cosyvoice3 import encoders, features

_OURS = ("REVISION", "RESAMPLER")
_RUNTIME = ("VERSION", "NUM_THREADS")

IDENTITIES = {
    "speech_tokens": Identity(
        network="s3 tokenizer v3",
        config=(),
        constants={
            encoders: (*_OURS, "TOKENIZER_RATE_HZ", *_RUNTIME),
            features: (
                "TOKENIZER_FFT",
                "TOKENIZER_HOP",
                "TOKENIZER_MELS",
                "TOKENIZER_RANGE",
            ),
        },
    ),
    "mel": Identity(
        network="24 khz mel",
        config=(),
        constants={
            encoders: (*_OURS, "MEL_RATE_HZ"),
            features: ("MEL_FFT", "MEL_HOP", "MEL_BINS", "MEL_FLOOR", "MEL_EPSILON"),
        },
    ),
    "speaker": Identity(
        network="campplus",
        config=(),
        constants={
            encoders: (*_OURS, "TOKENIZER_RATE_HZ", *_RUNTIME),
            features: ("SPEAKER_MELS",),
        },
    ),
}
