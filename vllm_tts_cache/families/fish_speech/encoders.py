"""The reference encoder of Fish Speech: the encode half of its DAC.

Its convolutions run in slices of time, and without TorchScript.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from vllm_omni.model_executor.models.fish_speech import dac_modules
from vllm_omni.model_executor.models.fish_speech.dac_modules import codec as host
from vllm_omni.model_executor.models.fish_speech.dac_modules.conv import CausalConvNet
from vllm_omni.model_executor.models.fish_speech.dac_modules.layers import Snake1d

from vllm_tts_cache.families.fish_speech import codec
from vllm_tts_cache.families.fish_speech.family import CODEC
from vllm_tts_cache.families.fish_speech.sizes import RELEASED, read_sizes
from vllm_tts_cache.families.networks.dac import encoder as dac
from vllm_tts_cache.families.networks.parts import replace_snakes
from vllm_tts_cache.families.networks.sinc_resample import RESAMPLER
from vllm_tts_cache.families.networks.slices import CausalPass, in_slices
from vllm_tts_cache.speaker.checkpoint import encoder_fingerprint
from vllm_tts_cache.speaker.reference import Encoders, MemoryNeed

# Raise it with any change here that changes what the encoder computes.
REVISION = 1

# Positions of the transformer before the quantizer; 190 s, of one frame each.
_MAX_FRAMES = 4_096

# At the released width; docs/gpu.md has the source of the figures. The fixed part is
# that of two slices. The rest is mostly attention masks, of any width's network.
_FIXED_BYTES = 192 * 1024**2
_BYTES_PER_SECOND = 4 * 1024**2

# A kernel computes less than two slices: 10 GFLOP at most at the released size.
SLICE_SECONDS = 1.0


class SlicedEncoder(nn.Module):
    """Computes the encoder's latents; layers before its transformer run in slices."""

    def __init__(self, encoder: host.Encoder):
        super().__init__()
        replace_snakes(encoder, Snake1d)
        layers = list(_flat(encoder.block))
        around = dac_modules.WindowLimitedTransformer
        places = (n for n, layer in enumerate(layers) if isinstance(layer, around))
        num_sliced = next(places, len(layers))
        self.sliced = nn.Sequential(*layers[:num_sliced])
        self.whole = nn.Sequential(*layers[num_sliced:])
        convs = (m for m in self.sliced.modules() if isinstance(m, CausalConvNet))
        stride = math.prod(conv.stride for conv in convs)
        self.num_samples = round(SLICE_SECONDS * codec.SAMPLE_RATE_HZ / stride) * stride

    def forward(self, samples: Tensor) -> Tensor:
        """``(batch, 1, num_samples)`` to ``(batch, width, num_samples / 512)``."""
        sliced = partial(_compute, self.sliced)
        return self.whole(in_slices(sliced, samples, num_samples=self.num_samples))


def _flat(layers: Any) -> Iterator[nn.Module]:
    for layer in layers:
        if isinstance(layer, host.EncoderBlock):
            yield from _flat(layer.block)
        else:
            yield layer


def _compute(layer: nn.Module, x: Tensor, causal: CausalPass) -> Tensor:
    match layer:
        case nn.Sequential():
            for part in layer:
                x = _compute(part, x, causal)
            return x
        case host.ResidualUnit():
            return x + _compute(layer.block, x, causal)
        case CausalConvNet():
            conv: Any = layer.conv
            return causal.convolve(conv, x)
    return layer(x)


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoder out of ``codec.pth``, as `Family.encoders_part` says.

    Raises: CheckpointError that names the file, or the tensors that do not fit.
    """
    path = model_dir / "codec.pth"
    sizes = read_sizes(model_dir)
    state = dac.read_codec_file(path)
    network, weights = codec.build_half("encoding", sizes, state, path=str(path))
    network.to(device)
    dac.fix_weight_norms(network)
    sliced: Any = SlicedEncoder(network.encoder)
    network.encoder = sliced
    settings = {
        "sizes": msgspec.structs.asdict(sizes),
        "sample_rate_hz": codec.SAMPLE_RATE_HZ,
        "samples_per_frame": codec.SAMPLES_PER_FRAME,
        "num_codebooks": codec.NUM_CODEBOOKS,
    }
    encoder = dac.DACEncoder(
        network=network,
        device=device,
        sample_rate_hz=codec.SAMPLE_RATE_HZ,
        samples_per_frame=codec.SAMPLES_PER_FRAME,
        max_frames=_MAX_FRAMES,
        fingerprint=encoder_fingerprint(
            "fish s2 dac", REVISION, RESAMPLER, weights, settings
        ),
        need=MemoryNeed(
            fixed_bytes=_FIXED_BYTES * sizes.encoder_dim // RELEASED.encoder_dim,
            bytes_per_second=_BYTES_PER_SECOND,
        ),
        name=CODEC,
    )
    return {CODEC: encoder}
