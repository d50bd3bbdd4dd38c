"""The host's reference encoder as its model loads it, but for its compiler."""

from types import SimpleNamespace

from vllm.config import LoadConfig
from vllm_omni.model_executor.models.breeze_tts_2.reference_encoder import (
    BreezeReferenceEncoder,
)


def host_encoder(checkpoint):
    model = SimpleNamespace(model=str(checkpoint), revision=None)
    config = SimpleNamespace(model_config=model, load_config=LoadConfig())
    encoder = BreezeReferenceEncoder(config)  # pyright: ignore[reportArgumentType]
    encoder.load_weights(config)  # pyright: ignore[reportArgumentType]
    encoder._compiled_encode = encoder._encode_impl
    return encoder
