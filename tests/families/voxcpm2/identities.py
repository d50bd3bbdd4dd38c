"""What the encodings of VoxCPM2 depend on."""

from dataclasses import asdict

from tests.families.cases import Identity, Section
from vllm_tts_cache.families.voxcpm2 import encoders
from vllm_tts_cache.families.voxcpm2.encoders import EncoderSizes

_CONFIG = (
    Section(
        file="config.json", path=("audio_vae_config",), values=asdict(EncoderSizes())
    ),
)
_CONSTANTS = {encoders: ("REVISION", "RESAMPLER")}

IDENTITIES = {
    name: Identity(network="voxcpm2 audio vae", config=_CONFIG, constants=_CONSTANTS)
    for name in ("reference", "continuation")
}
