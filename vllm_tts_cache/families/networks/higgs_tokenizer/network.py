"""The tokenizer's encode side as one network: samples to codes."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad
from torchaudio.functional import resample
from transformers import HubertConfig
from transformers.models.dac import modeling_dac as dac
from transformers.models.higgs_audio_v2_tokenizer import (
    modeling_higgs_audio_v2_tokenizer as modeling,
)
from transformers.models.hubert import modeling_hubert as hubert

from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import (
    SemanticSizes,
    TokenizerSizes,
)
from vllm_tts_cache.families.networks.parts import multiply_out, replace_snakes

# Samples of silence on each side of HuBERT's input, so that its features fill frames.
SEMANTIC_PADDING = 160


class HiggsNetwork(nn.Module):
    """``(1, 1, num_samples)`` float32 to ``(num_codebooks, num_frames)`` int64.

    Its parameters have the file's names. Call `multiply_out` after they are loaded,
    before `forward`.

    It is not computed in slices of time: HuBERT norms and attends over the whole clip.

    Source: ``HiggsAudioV2TokenizerModel.encode`` of transformers 5.14.
    """

    def __init__(self, sizes: TokenizerSizes):
        super().__init__()
        self._sizes = sizes
        acoustic: Any = sizes.acoustic_model_config
        self.acoustic_encoder = dac.DacEncoder(acoustic)
        replace_snakes(self.acoustic_encoder, dac.Snake1d)
        self.semantic_model = Hubert(sizes.semantic_model_config)
        self.encoder_semantic = modeling.SemanticEncoder(sizes)
        self.fc = nn.Linear(sizes.hidden_size, sizes.hidden_size)
        self.quantizer = _Quantizer(sizes)

    def forward(self, samples: Tensor) -> Tensor:
        """Encode, with the same bits in every thread and every call."""
        semantic = self._semantic(samples)
        # At a clip's end HuBERT may have a frame that the downsampling rounds away.
        if self._num_frames(samples.shape[-1]) != semantic.shape[-1]:
            half = self._sizes.samples_per_frame // 2
            samples = pad(samples, (half, half))
        both = torch.cat([self.acoustic_encoder(samples), semantic], dim=1)
        return self.quantizer(self.fc(both.transpose(1, 2)).transpose(1, 2))

    def _num_frames(self, num_samples: int) -> int:
        """Return the acoustic frames of so many samples; 0 or less of too few."""
        for block in self.acoustic_encoder.block:
            conv: nn.Conv1d = block.conv1  # pyright: ignore[reportAssignmentType]
            num_taps, stride = conv.kernel_size[0], conv.stride[0]
            padding = int(conv.padding[0])
            num_samples = (num_samples + 2 * padding - num_taps) // stride + 1
        return num_samples

    def multiply_out(self) -> None:
        """Compute, once, the weight that the file has as norm and direction."""
        positions: Any = self.semantic_model.encoder.pos_conv_embed
        multiply_out(positions.conv, 2)

    def _semantic(self, samples: Tensor) -> Tensor:
        sizes = self._sizes
        if sizes.sample_rate != sizes.semantic_sample_rate:
            samples = resample(samples, sizes.sample_rate, sizes.semantic_sample_rate)
        padded = pad(samples[:, 0], (SEMANTIC_PADDING, SEMANTIC_PADDING))
        features = self.semantic_model(padded)[:, :: sizes.features_per_frame]
        return self.encoder_semantic(features.transpose(1, 2))


class Hubert(nn.Module):
    """``(1, num_samples)`` to the mean of all its hidden states, ``(1, T, hidden)``.

    Transformers' loop over its layers is not used: it draws a random number for each
    layer, even without dropout, and an encode beside the decode loop would shift the
    draws of unseeded requests.

    Source: ``HubertModel`` of transformers 5.14, to which it is equal bit for bit on a
    CPU; its parameters have the file's names.
    """

    def __init__(self, sizes: SemanticSizes):
        super().__init__()
        config = HubertConfig(**asdict(sizes))
        config._attn_implementation = "sdpa"
        self.feature_extractor = hubert.HubertFeatureEncoder(config)
        self.feature_projection = hubert.HubertFeatureProjection(config)
        self.encoder = _Transformer(config)

    def forward(self, samples: Tensor) -> Tensor:
        """Encode; each position depends on the whole clip."""
        features = self.feature_extractor(samples)
        return self.encoder(self.feature_projection(features.transpose(1, 2)))


class _Transformer(nn.Module):
    def __init__(self, config: HubertConfig):
        super().__init__()
        self.pos_conv_embed = _Positions(config)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(hubert.HubertEncoderLayer(config) for _ in numbers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(x + self.pos_conv_embed(x))
        states = [x]
        for layer in self.layers:
            made = layer(x)  # a tuple before transformers 5.16
            x = made[0] if isinstance(made, tuple) else made
            states.append(x)
        return torch.stack(states, dim=1).mean(dim=1)


class _Positions(nn.Module):
    """A wide convolution, the only positional encoding.

    Its weight is kept as norm and direction until `multiply_out` is called.
    """

    def __init__(self, config: HubertConfig):
        super().__init__()
        width, kernel = config.hidden_size, config.num_conv_pos_embeddings
        groups = config.num_conv_pos_embedding_groups
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=groups)
        shape = self.conv.weight.shape
        del self.conv.weight
        self.conv.weight_g = nn.Parameter(torch.empty(1, 1, kernel))
        self.conv.weight_v = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        num_places = x.shape[1]
        # A kernel of even width gives one position too many.
        return gelu(self.conv(x.transpose(1, 2))[:, :, :num_places]).transpose(1, 2)


class _Quantizer(nn.Module):
    """Codebooks in a row; each codes the residual that those before it leave."""

    def __init__(self, sizes: TokenizerSizes):
        super().__init__()
        vector = modeling.HiggsAudioV2TokenizerVectorQuantization
        books = [vector(sizes) for _ in range(sizes.num_codebooks)]  # pyright: ignore[reportArgumentType]
        for book in books:
            # Only training needs them.
            del book.codebook.inited, book.codebook.cluster_size
            del book.codebook.embed_avg
        del books[-1].project_out  # the residual of the last codebook is not coded
        self.quantizers = nn.ModuleList(books)

    def forward(self, x: Tensor) -> Tensor:
        books: list[Any] = [*self.quantizers]
        last = books.pop()
        found: list[Tensor] = []
        for book in books:
            found.append(book.encode(x))
            x = x - book.decode(found[-1])
        return torch.cat([*found, last.encode(x)])
