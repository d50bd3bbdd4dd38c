"""Sizes of the DAC, by their names in ``codec.json``."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.speaker.checkpoint_dir import read_json

Positive = Annotated[int, Meta(gt=0)]


class CodecSizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Widths of the first convolutions, and layers of the transformers.

    The quantizer has a transformer on each side, and one ends the encoder.
    """

    encoder_dim: Annotated[int, Meta(gt=0, multiple_of=4)] = 64
    decoder_dim: Annotated[int, Meta(gt=0, multiple_of=16)] = 1536
    quantizer_layers: Positive = 8
    encoder_layers: Positive = 4

    @property
    def latent_dim(self) -> int:
        """Width of the latents that are quantized."""
        return self.encoder_dim * 16


RELEASED = CodecSizes()


def read_sizes(model_dir: Path) -> CodecSizes:
    """Read ``codec.json``; a released model has no such file, and gets `RELEASED`.

    Raises: CheckpointError if the file cannot be read, or a field or a value is wrong.
    """
    path = model_dir / "codec.json"
    if not path.exists():
        return RELEASED
    try:
        return msgspec.convert(read_json(path), CodecSizes)
    except msgspec.ValidationError as exc:
        raise CheckpointError(str(path), str(exc)) from exc
