"""What the encodings of OmniVoice depend on."""

from tests.families.cases import Identity
from tests.families.networks.higgs_tokenizer import CONSTANTS, NETWORK, sections
from vllm_tts_cache.families.omnivoice import encoders, preparation

IDENTITIES = {
    "codec": Identity(
        network=NETWORK,
        config=sections("audio_tokenizer/config.json"),
        constants={
            **CONSTANTS,
            encoders: ("FUNCTION_RESAMPLER",),
            preparation: (
                "REVISION",
                "LOUDNESS",
                "SILENCE_DB",
                "LONGEST_MS",
                "LEADING_MS",
                "TRAILING_MS",
                "STEP_MS",
                "EDGE_STEP_MS",
            ),
        },
    )
}
