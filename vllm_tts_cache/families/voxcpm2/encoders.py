"""The AudioVAE's encoder: reference audio to the features that a prompt is made of."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.networks.resample import RESAMPLER, resample
from vllm_tts_cache.families.voxcpm2.checkpoint import (
    read_encoder_sizes,
    read_encoder_weights,
)
from vllm_tts_cache.families.voxcpm2.family import (
    CONTINUATION_ENCODER,
    REFERENCE_ENCODER,
)
from vllm_tts_cache.families.voxcpm2.network import AudioEncoder
from vllm_tts_cache.families.voxcpm2.positions import (
    LATENTS_PER_POSITION,
    SAMPLE_RATE_HZ,
    SAMPLES_PER_POSITION,
)
from vllm_tts_cache.speaker.checkpoint import assign_float32, encoder_fingerprint
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.speaker.reference import MemoryNeed, ReferenceEncoder
from vllm_tts_cache.store.encoding import Encoding

# Raise it with any change here that changes what an encoder computes.
REVISION = 1

# With the released 128 channels, not in slices; see docs/gpu.md for its source.
_NUM_CHANNELS = 128
_NEED = MemoryNeed(bytes_per_second=64 * 1024**2)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AudioVAEEncoder:
    """Gives ``features``: ``(num_positions, 4, latent_dim)`` float32.

    Attributes:
        network: Shared by both encoders.
        fills_up_before: Whether silence that makes whole positions of a clip stands
            before it. Then the clip's end meets what is to be spoken next.
    """

    network: AudioEncoder
    device: torch.device
    fills_up_before: bool
    fingerprint: str
    name: str
    need: MemoryNeed

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio, filled up with silence to whole positions.

        Raises:
            EncodeError: The network failed on this audio.
        """
        try:
            samples = self._filled_up(resample(audio, SAMPLE_RATE_HZ))
            with exact_float32(self.device):
                waveform = torch.tensor(samples, device=self.device).view(1, 1, -1)
                latents = self.network(waveform)[0].cpu()
        except (RuntimeError, ValueError) as exc:
            raise EncodeError(f"AudioVAE encoder: {exc}") from exc
        shape = (-1, LATENTS_PER_POSITION, len(latents))
        return Encoding({"features": latents.T.reshape(shape).numpy()})

    def _filled_up(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        missing = -samples.size % SAMPLES_PER_POSITION
        return np.pad(samples, (missing, 0) if self.fills_up_before else (0, missing))


def load_reference_encoders(
    model_dir: Path, device: torch.device
) -> dict[str, ReferenceEncoder]:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises:
        CheckpointError: The AudioVAE is not one of 16 kHz and 640 samples a latent, in
            patches of 4, or a tensor of its encoder is missing, left over or of another
            shape; the message names it.
    """
    sizes = read_encoder_sizes(model_dir)
    source, weights = read_encoder_weights(model_dir)
    with torch.device("meta"):
        network = AudioEncoder(
            width=sizes.encoder_dim,
            rates=sizes.encoder_rates,
            latent_dim=sizes.latent_dim,
            depthwise=sizes.depthwise,
        )
    weights = assign_float32(network, weights, path=source)
    network.to(device)
    with torch.no_grad():
        network.multiply_out()  # on the device, as the official package does it
    encoders: dict[str, ReferenceEncoder] = {}
    for name in (REFERENCE_ENCODER, CONTINUATION_ENCODER):
        fills_up_before = name == CONTINUATION_ENCODER
        settings = {
            **asdict(sizes),
            "sample_rate_hz": SAMPLE_RATE_HZ,
            "latents_per_position": LATENTS_PER_POSITION,
            "fills_up_before": fills_up_before,
        }
        encoders[name] = AudioVAEEncoder(
            network=network,
            device=device,
            fills_up_before=fills_up_before,
            fingerprint=encoder_fingerprint(
                network="voxcpm2 audio vae",
                revision=REVISION,
                resampler=RESAMPLER,
                weights=weights,
                settings=settings,
            ),
            name=name,
            need=_NEED.scaled(sizes.encoder_dim / _NUM_CHANNELS),
        )
    return encoders
