"""The noise that the decoder starts from: one for all, as in the official code.

The host draws new noise for every chunk of every request. So one text in one voice is
never heard twice alike, what was spoken meanwhile changes it, and a chunk goes on from
another draw than the one before it ended with.
"""

from typing import Any

import torch
from torch import Tensor
from vllm_omni.model_executor.models.cosyvoice3.code2wav_core.cfm import (
    CausalConditionalCFM,
)

NUM_MELS = 80
# 300 s of speech and its reference; a speech takes at most 4,096 tokens, of 164 s.
MAX_FRAMES = 50 * 300
_SEED = 0


class FixedNoiseCFM(CausalConditionalCFM):
    """The host's flow matching, from the same noise every time.

    Attributes:
        noise: ``(1, 80, MAX_FRAMES)`` float32; a frame's noise depends on its place
            alone, so chunks of a stream agree where they overlap.
    """

    noise: Tensor

    @torch.inference_mode()
    def forward(
        self,
        mu: Tensor,
        mask: Tensor,
        n_timesteps: int,
        temperature: float = 1.0,
        spks: Tensor | None = None,
        cond: Tensor | None = None,
        streaming: bool = False,  # noqa: ARG002  the host's signature
    ) -> tuple[Tensor, None]:
        """Solve from the noise to the mel.

        Source: ``CausalConditionalCFM.forward`` of the official code.
        """
        noise = self.noise[:, :, : mu.size(2)].to(mu) * temperature
        span = torch.linspace(0, 1, n_timesteps + 1, device=mu.device, dtype=mu.dtype)
        if self.t_scheduler == "cosine":
            span = 1 - torch.cos(span * 0.5 * torch.pi)
        start = noise.expand(mu.size(0), -1, -1)
        mel = self.solve_euler(start, span, mu, mask, spks, cond)
        return mel, None


def fix_noise(decoder: Any) -> None:
    """Have a built decoder start from the official noise."""
    decoder.__class__ = FixedNoiseCFM
    generator = torch.Generator().manual_seed(_SEED)
    device = next(decoder.parameters()).device
    decoder.noise = torch.randn(
        (1, NUM_MELS, MAX_FRAMES),
        generator=generator,
        dtype=torch.float32,
        device="cpu",
    ).to(device)
