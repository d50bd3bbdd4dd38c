"""What the encodings of Higgs Audio v3 depend on."""

from tests.families.cases import Identity
from tests.families.networks.higgs_tokenizer import CONSTANTS, NETWORK, sections
from vllm_tts_cache.families.higgs_audio_v3 import encoders
from vllm_tts_cache.families.higgs_audio_v3.encoders import SIZES

IDENTITIES = {
    "codec": Identity(
        network=NETWORK,
        config=sections("config.json", SIZES),
        constants={**CONSTANTS, encoders: ("RESAMPLER",)},
    )
}
