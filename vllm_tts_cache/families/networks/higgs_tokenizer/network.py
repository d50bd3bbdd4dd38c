"""The tokenizer's encode side as one network: samples to codes."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from torchaudio.functional import resample

from vllm_tts_cache.families.networks.higgs_tokenizer.acoustic import AcousticEncoder
from vllm_tts_cache.families.networks.higgs_tokenizer.semantic import (
    Hubert,
    SemanticEncoder,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import TokenizerSizes

# Silence on both sides of what HuBERT hears: with it, it gives whole frames.
SEMANTIC_PADDING = 160


class HiggsNetwork(nn.Module):
    """``(1, 1, num_samples)`` float32 to ``(num_codebooks, num_frames)`` int64.

    Its parameters are called as in the file. Call `multiply_out` when they are loaded,
    before it is run.

    It is not computed in slices of time: HuBERT norms and attends over the whole clip.

    Source: ``HiggsAudioV2TokenizerModel.encode`` of transformers 5.14.
    """

    def __init__(self, sizes: TokenizerSizes):
        super().__init__()
        self._sizes = sizes
        self.acoustic_encoder = AcousticEncoder(sizes.acoustic_model_config)
        self.semantic_model = Hubert(sizes.semantic_model_config)
        self.encoder_semantic = SemanticEncoder(sizes)
        self.fc = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        self.quantizer = _Quantizer(sizes)

    def forward(self, samples: Tensor) -> Tensor:
        """Encode; the same in every thread and however often."""
        semantic = self._semantic(samples)
        # What the downsampling rounds away at a clip's end is a frame to HuBERT.
        if self.acoustic_encoder.num_frames(samples.shape[-1]) != semantic.shape[-1]:
            half = self._sizes.samples_per_frame // 2
            samples = pad(samples, (half, half))
        both = torch.cat([self.acoustic_encoder(samples), semantic], dim=1)
        return self.quantizer(self.fc(both.transpose(1, 2)))

    def multiply_out(self) -> None:
        """Make the weight that is kept as norm and direction, once."""
        self.semantic_model.encoder.pos_conv_embed.multiply_out()

    def _semantic(self, samples: Tensor) -> Tensor:
        sizes = self._sizes
        if sizes.sample_rate != sizes.semantic_sample_rate:
            samples = resample(samples, sizes.sample_rate, sizes.semantic_sample_rate)
        padded = pad(samples[:, 0], (SEMANTIC_PADDING, SEMANTIC_PADDING))
        features = self.semantic_model(padded)[:, :: sizes.features_per_frame]
        return self.encoder_semantic(features.transpose(1, 2))


class _Quantizer(nn.Module):
    """Each codebook codes what those before it left over."""

    def __init__(self, sizes: TokenizerSizes):
        super().__init__()
        self.quantizers = nn.ModuleList(
            _Codebook(sizes, is_last=number == sizes.num_codebooks)
            for number in range(1, sizes.num_codebooks + 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for book in self.quantizers:
            codes, meant = book(x)
            found.append(codes)
            x = x - meant
        return torch.cat(found)


class _Codebook(nn.Module):
    """``(1, num_frames, hidden)`` to its codes, and to what they stand for."""

    def __init__(self, sizes: TokenizerSizes, *, is_last: bool):
        super().__init__()
        hidden, width = sizes.hidden_size, sizes.codebook_dim or sizes.hidden_size
        self.codebook = nn.Module()
        self.codebook.embed = nn.Parameter(torch.empty(sizes.codebook_size, width))
        self.project_in = nn.Linear(hidden, width)
        # What the last one leaves over is not coded any more.
        self.project_out = None if is_last else nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        entries: Tensor = self.codebook.embed  # pyright: ignore[reportAssignmentType]
        places = self.project_in(x)[0]
        squares = places.pow(2).sum(1, keepdim=True)
        distances = squares - 2 * places @ entries.t()
        distances = distances + entries.t().pow(2).sum(0, keepdim=True)
        codes = (-distances).max(dim=-1).indices[None]
        if self.project_out is None:
            return codes, x
        return codes, self.project_out(embedding(codes, entries))
