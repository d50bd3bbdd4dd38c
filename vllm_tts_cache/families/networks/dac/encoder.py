"""The encode half of a DAC: reference audio to the codes of an in-context clone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.networks.sinc_resample import resample
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DACEncoder:
    """Gives ``codes``: ``(num_frames, 10)`` int16, the semantic codebook first.

    Attributes:
        network: One of the host's, without its decode half.
        max_frames: Positions of its transformer before the quantizer.
        clean_up: Called after each audio.
    """

    network: Any
    device: torch.device
    sample_rate_hz: int
    samples_per_frame: int
    max_frames: float = math.inf
    fingerprint: str
    need: MemoryNeed
    name: str
    clean_up: Callable[[], None] = lambda: None

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio; its last frame may be filled up with silence.

        Of several clips each is encoded by itself, as if there were no others, and
        their frames follow each other. Source: fish-speech's server and its
        ``generate_long``.

        Raises:
            EncodeError: The network failed on this audio, or has not as many positions.
        """
        try:
            with exact_float32(self.device):
                of_clips = [
                    self._codes(resample(clip, self.sample_rate_hz, self.device))
                    for clip in audio.clips()
                ]
                codes = torch.cat(of_clips, dim=1).cpu().numpy()
        except (RuntimeError, ValueError) as exc:
            raise EncodeError(f"codec encoder: {exc}") from exc
        finally:
            self.clean_up()
        return Encoding({"codes": codes.T.astype(np.int16)})

    def _codes(self, samples: Tensor) -> Tensor:
        """``(10, num_frames)``; what the host computes only to drop it is left out."""
        num_frames = math.ceil(samples.numel() / self.samples_per_frame)
        if num_frames > self.max_frames:
            # On a GPU the position out of range would end the process.
            raise ValueError(f"{num_frames} frames are more than {self.max_frames}")
        missing = num_frames * self.samples_per_frame - samples.numel()
        latents = self.network.encoder(pad(samples, (0, missing)).view(1, 1, -1))
        quantizer = self.network.quantizer
        latents = quantizer.pre_module(quantizer.downsample(latents))
        semantic, semantic_codes, *_ = quantizer.semantic_quantizer(latents)
        _, residual_codes, *_ = quantizer.quantizer(latents - semantic)
        return torch.cat([semantic_codes, residual_codes], dim=1)[0]
