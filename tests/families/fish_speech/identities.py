"""What the encodings of Fish Speech depend on."""

from msgspec.structs import asdict

from tests.families.cases import Identity, Section
from vllm_tts_cache.families.fish_speech import codec, encoders
from vllm_tts_cache.families.fish_speech.sizes import RELEASED

IDENTITIES = {
    "codec": Identity(
        network="fish s2 dac",
        config=(Section(file="codec.json", values=asdict(RELEASED)),),
        constants={
            encoders: ("REVISION", "RESAMPLER"),
            codec: ("SAMPLE_RATE_HZ", "SAMPLES_PER_FRAME", "NUM_CODEBOOKS"),
        },
    )
}
