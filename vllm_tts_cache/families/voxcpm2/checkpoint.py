"""What a VoxCPM2 checkpoint says of its AudioVAE's encoder: sizes and weights."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from torch import Tensor

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.networks.torch_file import only_tensors, read_torch_file
from vllm_tts_cache.families.voxcpm2.positions import (
    LATENTS_PER_POSITION,
    SAMPLE_RATE_HZ,
    SAMPLES_PER_LATENT,
)
from vllm_tts_cache.speaker.checkpoint import read_safetensors
from vllm_tts_cache.speaker.checkpoint_dir import read_json

Positive = Annotated[int, msgspec.Meta(gt=0)]

_PREFIX = "encoder."
# How sure the encoder is of its means, which are all that is taken of it.
_NOT_READ = "fc_logvar."


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSizes:
    """The encoder's part of ``audio_vae_config``, with the official defaults."""

    encoder_dim: Positive = 128
    encoder_rates: tuple[Positive, ...] = (2, 5, 8, 8)
    latent_dim: Positive = 64
    depthwise: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _AudioVAEConfig(EncoderSizes):
    sample_rate: Positive = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    audio_vae_config: _AudioVAEConfig | None = None
    patch_size: Positive = 4


def read_encoder_sizes(model_dir: Path) -> EncoderSizes:
    """Read them out of ``config.json``.

    Raises:
        CheckpointError: A value is of another type, or a clip would take another
            number of positions than is announced for it.
    """
    path = str(model_dir / "config.json")
    try:
        config = msgspec.convert(read_json(model_dir / "config.json"), _Config)
    except msgspec.ValidationError as exc:
        raise CheckpointError(path, str(exc)) from exc
    vae = config.audio_vae_config or _AudioVAEConfig()
    found = vae.sample_rate, math.prod(vae.encoder_rates), config.patch_size
    known = SAMPLE_RATE_HZ, SAMPLES_PER_LATENT, LATENTS_PER_POSITION
    if found != known:
        described = "{} Hz, {} samples a latent and {} latents a patch"
        reason = f"voices are cloned at {described.format(*known)} only, and it has "
        raise CheckpointError(path, reason + described.format(*found))
    return EncoderSizes(
        encoder_dim=vae.encoder_dim,
        encoder_rates=vae.encoder_rates,
        latent_dim=vae.latent_dim,
        depthwise=vae.depthwise,
    )


def read_encoder_weights(model_dir: Path) -> tuple[str, dict[str, Tensor]]:
    """The encoder's tensors under their names there, and where they are from.

    They come from the file that the official package takes, on the CPU and in the
    file's dtypes; they may be views of it.

    Raises: CheckpointError.
    """
    path = model_dir / "audiovae.safetensors"
    if path.exists():
        found = read_safetensors(path, _PREFIX)
    else:
        path = model_dir / "audiovae.pth"
        inside = {
            name.removeprefix(_PREFIX): value
            for name, value in read_torch_file(path).items()
            if name.startswith(_PREFIX)
        }
        found = only_tensors(inside)
    weights = {n: t for n, t in found.items() if not n.startswith(_NOT_READ)}
    return f"{path} {_PREFIX}*", weights
