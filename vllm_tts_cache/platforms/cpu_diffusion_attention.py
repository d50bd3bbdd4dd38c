"""Attention of the host's diffusion models, and of decoders that are made of such.

The host asks its platform which of its own forms to take and knows no CPU. All of them
are torch's attention but for the form of the mask.
"""

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CPUDiffusionAttention(SDPAImpl):
    """Torch's attention, whatever the platform says that it is."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Compute ``(batch, length, heads, head_size)`` as on a GPU."""
        return self.forward_cuda(query, key, value, attn_metadata)


class CPUDiffusionBackend(SDPABackend):
    """The backend that the CPU platform names."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        """Return the class above."""
        return CPUDiffusionAttention


def fall_back_on_it() -> None:
    """Have the host's layers fall back on it too.

    Beside the attention that the platform names, each has one of the host's own
    choice: some models compute with that where they are not on a card they know.
    """
    SDPABackend.get_impl_cls = staticmethod(CPUDiffusionBackend.get_impl_cls)
