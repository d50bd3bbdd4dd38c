"""What the encodings of OmniVoice depend on."""

from dataclasses import asdict, fields

from tests.families.identity import Identity, Section
from vllm_tts_cache.families.networks.higgs_tokenizer import tokenizer
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import (
    AcousticSizes,
    SemanticSizes,
    TokenizerSizes,
)
from vllm_tts_cache.families.omnivoice import encoders, preparation, silence

_FILE = "audio_tokenizer/config.json"
_PARTS = {
    "acoustic_model_config": AcousticSizes(),
    "semantic_model_config": SemanticSizes(),
}
_WHOLE = asdict(TokenizerSizes(model_type="higgs_audio_v2_tokenizer"))

IDENTITIES = {
    "codec": Identity(
        network=tokenizer.NETWORK,
        config=(
            Section(
                file=_FILE,
                values={n: value for n, value in _WHOLE.items() if n not in _PARTS},
            ),
            *(
                Section(
                    file=_FILE,
                    path=(name,),
                    values={f.name: getattr(part, f.name) for f in fields(part)},
                )
                for name, part in _PARTS.items()
            ),
        ),
        constants={
            tokenizer: ("REVISION", "SEMANTIC_PADDING", "SEMANTIC_RESAMPLER"),
            encoders: ("RESAMPLER",),
            preparation: ("REVISION", "LOUDNESS"),
            silence: (
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
