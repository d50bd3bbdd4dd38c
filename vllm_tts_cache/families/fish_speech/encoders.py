"""Loading the reference encoder of a Fish Speech S2 Pro checkpoint."""

from pathlib import Path

import torch

from vllm_tts_cache.families.fish_speech.codec_encoder import load_codec_encoder
from vllm_tts_cache.speaker.reference import ReferenceEncoder


def load_reference_encoders(
    model_dir: Path, device: torch.device
) -> dict[str, ReferenceEncoder]:
    """The codec's encoder, in float32 and in memory of its own.

    Args:
        model_dir: The checkpoint in its released layout.
        device: Where it computes.

    Returns:
        By name: ``codec``.

    Raises:
        CheckpointError: ``codec.pth`` cannot be read, or a tensor of the codec is
            missing or of another shape; the message names them.
    """
    encoder = load_codec_encoder(model_dir, device)
    return {encoder.name: encoder}
