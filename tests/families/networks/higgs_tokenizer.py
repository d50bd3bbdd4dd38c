"""What the encodings of the Higgs Audio tokenizer depend on, whoever has it."""

from dataclasses import asdict
from typing import Any

from tests.families.cases import Section
from vllm_tts_cache.families.networks.higgs_tokenizer import encoder
from vllm_tts_cache.families.networks.higgs_tokenizer.encoder import NETWORK
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import RELEASED

__all__ = ["CONSTANTS", "NETWORK", "sections"]

CONSTANTS = {encoder: ("REVISION", "NETWORK", "SEMANTIC_PADDING", "SEMANTIC_RESAMPLER")}
_PARTS = ("acoustic_model_config", "semantic_model_config")


def sections(file, *path):
    """The config's parts, where it lies at ``path`` in a file of the checkpoint."""
    values: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(RELEASED).items()
    }
    parts = [values.pop(name) for name in _PARTS]
    return (
        Section(file=file, path=path, values=values),
        *(
            Section(file=file, path=(*path, name), values=part)
            for name, part in zip(_PARTS, parts, strict=True)
        ),
    )
