"""The reference encoder of Fish Speech: the encode half of its DAC."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vllm_tts_cache.families.fish_speech.codec import (
    NUM_CODEBOOKS,
    RELEASED,
    SAMPLE_RATE_HZ,
    SAMPLES_PER_FRAME,
    read_sizes,
)
from vllm_tts_cache.families.fish_speech.codec_convolutions import SlicedEncoder
from vllm_tts_cache.families.fish_speech.codec_halves import build_encoding_half
from vllm_tts_cache.families.fish_speech.family import CODEC
from vllm_tts_cache.families.networks.dac.encoder import DACEncoder
from vllm_tts_cache.families.networks.dac.file import fix_weight_norms, read_codec_file
from vllm_tts_cache.families.networks.sinc_resample import RESAMPLER
from vllm_tts_cache.speaker.checkpoint import encoder_fingerprint
from vllm_tts_cache.speaker.reference import MemoryNeed, ReferenceEncoder

# Raise it with any change here that changes what the encoder computes.
REVISION = 1

# Positions of the transformer before the quantizer; 190 s, of one frame each.
_MAX_FRAMES = 4_096

# Of the released width; see docs/gpu.md for where the figures come from. Two slices
# are fixed. What grows is mostly the masks of attention, whatever the width.
_FIXED_BYTES = 192 * 1024**2
_BYTES_PER_SECOND = 4 * 1024**2


def load_reference_encoders(
    model_dir: Path, device: torch.device
) -> dict[str, ReferenceEncoder]:
    """Load the encoder out of ``codec.pth``, as `Family.encoders_part` says.

    Raises:
        CheckpointError: It cannot be read, or a tensor of the codec is missing or of
            another shape; the message names them.
    """
    path = model_dir / "codec.pth"
    sizes = read_sizes(model_dir)
    network, weights = build_encoding_half(sizes, read_codec_file(path), path=str(path))
    network.to(device)
    fix_weight_norms(network)
    sliced: Any = SlicedEncoder(network.encoder)
    network.encoder = sliced
    settings = {
        "sizes": asdict(sizes),
        "sample_rate_hz": SAMPLE_RATE_HZ,
        "samples_per_frame": SAMPLES_PER_FRAME,
        "num_codebooks": NUM_CODEBOOKS,
    }
    encoder = DACEncoder(
        network=network,
        device=device,
        sample_rate_hz=SAMPLE_RATE_HZ,
        samples_per_frame=SAMPLES_PER_FRAME,
        max_frames=_MAX_FRAMES,
        fingerprint=encoder_fingerprint(
            network="fish s2 dac",
            revision=REVISION,
            resampler=RESAMPLER,
            weights=weights,
            settings=settings,
        ),
        need=MemoryNeed(
            fixed_bytes=_FIXED_BYTES * sizes.encoder_dim // RELEASED.encoder_dim,
            bytes_per_second=_BYTES_PER_SECOND,
        ),
        name=CODEC,
    )
    return {CODEC: encoder}
