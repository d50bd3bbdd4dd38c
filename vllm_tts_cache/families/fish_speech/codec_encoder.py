"""The DAC's encoder: reference audio to the codes of an in-context clone."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm_omni.model_executor.models.fish_speech.dac_modules import DAC

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.fish_speech.codec import (
    NUM_CODEBOOKS,
    RELEASED,
    SAMPLE_RATE_HZ,
    SAMPLES_PER_FRAME,
    read_sizes,
)
from vllm_tts_cache.families.fish_speech.codec_convolutions import SlicedEncoder
from vllm_tts_cache.families.fish_speech.codec_halves import (
    build_encoding_half,
)
from vllm_tts_cache.families.fish_speech.family import CODEC
from vllm_tts_cache.families.networks.dac.file import fix_weight_norms, read_codec_file
from vllm_tts_cache.families.networks.sinc_resample import RESAMPLER, resample
from vllm_tts_cache.speaker.checkpoint import encoder_fingerprint
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

# Raise it with any change here that changes what the encoder computes.
REVISION = 1

# Positions of the transformer before the quantizer; 190 s, of one frame each.
_MAX_FRAMES = 4_096

# Of the released width; see docs/gpu.md for where the figures come from. Two slices
# are fixed. What grows is mostly the masks of attention, whatever the width.
_FIXED_BYTES = 192 * 1024**2
_BYTES_PER_SECOND = 4 * 1024**2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CodecEncoder:
    """Gives ``codes``: ``(num_frames, 10)`` int16, the semantic codebook first."""

    network: DAC
    device: torch.device
    fingerprint: str
    need: MemoryNeed
    name: str = CODEC

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio; its last frame may be filled up with silence.

        Of several clips each is encoded by itself, as if there were no others, and
        their frames follow each other. Source: fish-speech's server and its
        ``generate_long``.

        Raises:
            EncodeError: The network failed on this audio, or it is longer than 190 s.
        """
        try:
            with exact_float32(self.device):
                of_clips = [
                    self._codes(resample(clip, SAMPLE_RATE_HZ, self.device))
                    for clip in audio.clips()
                ]
                codes = torch.cat(of_clips, dim=1).cpu().numpy()
        except (RuntimeError, ValueError) as exc:
            raise EncodeError(f"codec encoder: {exc}") from exc
        return Encoding({"codes": codes.T.astype(np.int16)})

    def _codes(self, samples: Tensor) -> Tensor:
        """``(10, num_frames)``; what the host computes only to drop it is left out."""
        num_frames = math.ceil(samples.numel() / SAMPLES_PER_FRAME)
        if num_frames > _MAX_FRAMES:
            # On a GPU the position out of range would end the process.
            raise ValueError(f"{num_frames} frames are more than {_MAX_FRAMES}")
        missing = num_frames * SAMPLES_PER_FRAME - samples.numel()
        latents = self.network.encoder(pad(samples, (0, missing)).view(1, 1, -1))
        quantizer: Any = self.network.quantizer  # any module, the host's hint says
        latents = quantizer.pre_module(quantizer.downsample(latents))
        semantic, semantic_codes, *_ = quantizer.semantic_quantizer(latents)
        _, residual_codes, *_ = quantizer.quantizer(latents - semantic)
        return torch.cat([semantic_codes, residual_codes], dim=1)[0]


def load_codec_encoder(model_dir: Path, device: torch.device) -> CodecEncoder:
    """Load it from the checkpoint's ``codec.pth``.

    Raises:
        CheckpointError: The file is not the whole codec.
    """
    path = model_dir / "codec.pth"
    sizes = read_sizes(model_dir)
    network, weights = build_encoding_half(sizes, read_codec_file(path), path=str(path))
    network.to(device)
    fix_weight_norms(network)
    sliced: Any = SlicedEncoder(network.encoder)
    network.encoder = sliced
    settings = {
        "sizes": sizes.to_json(),
        "sample_rate_hz": SAMPLE_RATE_HZ,
        "samples_per_frame": SAMPLES_PER_FRAME,
        "num_codebooks": NUM_CODEBOOKS,
    }
    return CodecEncoder(
        network=network,
        device=device,
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
    )
