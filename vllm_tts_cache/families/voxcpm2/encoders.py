"""The AudioVAE's encoder: reference audio to the features that a prompt is made of."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.networks.resample import RESAMPLER, resample
from vllm_tts_cache.families.networks.torch_file import read_torch_file, tensors_under
from vllm_tts_cache.families.voxcpm2 import family, positions
from vllm_tts_cache.families.voxcpm2.network import AudioEncoder
from vllm_tts_cache.speaker import checkpoint
from vllm_tts_cache.speaker.checkpoint_dir import check_rates, read_json
from vllm_tts_cache.speaker.precision import encoding_exactly
from vllm_tts_cache.speaker.reference import Encoders, MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

# Raise it with any change here that changes what an encoder computes.
REVISION = 1

# With the released 128 channels, without slices; docs/gpu.md has the source.
_NUM_CHANNELS = 128
_NEED = MemoryNeed(bytes_per_second=64 * 1024**2)

Positive = Annotated[int, msgspec.Meta(gt=0)]

_PREFIX = "encoder."
# The layer of the latents' variances; only the means are used.
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
    """Read the encoder's sizes from ``config.json``.

    Raises: CheckpointError if a value is of another type, or a clip would take another
    number of positions than `positions` counts for it.
    """
    path = model_dir / "config.json"
    try:
        config = msgspec.convert(read_json(path), _Config)
    except msgspec.ValidationError as exc:
        raise CheckpointError(str(path), str(exc)) from exc
    vae = config.audio_vae_config or _AudioVAEConfig()
    check_rates(
        path,
        "{} Hz, {} samples a latent and {} latents a patch",
        found=(vae.sample_rate, math.prod(vae.encoder_rates), config.patch_size),
        known=(
            *(positions.SAMPLE_RATE_HZ, positions.SAMPLES_PER_LATENT),
            positions.LATENTS_PER_POSITION,
        ),
    )
    return EncoderSizes(**{f.name: getattr(vae, f.name) for f in fields(EncoderSizes)})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AudioVAEEncoder:
    """Gives ``features``: ``(num_positions, 4, latent_dim)`` float32.

    Attributes:
        fills_up_before: Whether the silence that fills a clip up to whole positions
            stands before the clip: then the clip's end meets the speech that follows.
    """

    network: AudioEncoder
    device: torch.device
    fills_up_before: bool
    fingerprint: str
    name: str
    need: MemoryNeed

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio, filled up with silence to whole positions.

        Raises: EncodeError if the network failed on this audio.
        """
        with encoding_exactly(self.device, "AudioVAE encoder"):
            samples = resample(audio, positions.SAMPLE_RATE_HZ)
            missing = -samples.size % positions.SAMPLES_PER_POSITION
            sides = (missing, 0) if self.fills_up_before else (0, missing)
            samples = np.pad(samples, sides)
            waveform = torch.tensor(samples, device=self.device).view(1, 1, -1)
            latents = self.network(waveform)[0].cpu()
        shape = (-1, positions.LATENTS_PER_POSITION, len(latents))
        return Encoding({"features": latents.T.reshape(shape).numpy()})


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises: CheckpointError if the AudioVAE is not one of 16 kHz and 640 samples a
    latent, in patches of 4, or a tensor of its encoder does not fit.
    """
    sizes = read_encoder_sizes(model_dir)
    path = model_dir / "audiovae.safetensors"  # the official package prefers it, too
    if path.exists():
        found = checkpoint.read_safetensors(path, _PREFIX)
    else:
        path = model_dir / "audiovae.pth"
        found = tensors_under(read_torch_file(path), _PREFIX)
    found = {n: t for n, t in found.items() if not n.startswith(_NOT_READ)}
    with torch.device("meta"):
        network = AudioEncoder(**asdict(sizes))
    weights = checkpoint.assign_float32(network, found, path=f"{path} {_PREFIX}*")
    network.to(device)
    with torch.no_grad():
        network.multiply_out()  # on the device, as the official package does it
    encoders: Encoders = {}
    for name in (family.REFERENCE_ENCODER, family.CONTINUATION_ENCODER):
        fills_up_before = name == family.CONTINUATION_ENCODER
        settings = {
            **asdict(sizes),
            "sample_rate_hz": positions.SAMPLE_RATE_HZ,
            "latents_per_position": positions.LATENTS_PER_POSITION,
            "fills_up_before": fills_up_before,
        }
        encoders[name] = AudioVAEEncoder(
            network=network,
            device=device,
            fills_up_before=fills_up_before,
            fingerprint=checkpoint.encoder_fingerprint(
                "voxcpm2 audio vae", REVISION, RESAMPLER, weights, settings
            ),
            name=name,
            need=_NEED.scaled(sizes.encoder_dim / _NUM_CHANNELS),
        )
    return encoders
