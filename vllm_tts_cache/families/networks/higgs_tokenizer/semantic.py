"""The semantic half of the tokenizer: HuBERT, and the convolutions behind it.

Transformers' HuBERT is not used: it draws a random number for each layer, even without
dropout, and an encode beside the decode loop would shift the draws of unseeded
requests.

Source: ``HubertModel`` and ``HiggsAudioV2TokenizerModel`` of transformers 5.14, to
which it is equal bit for bit on a CPU; its parameters have the file's names.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, gelu, scaled_dot_product_attention

from vllm_tts_cache.families.networks import parts
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import (
    SemanticSizes,
    TokenizerSizes,
)


class Hubert(nn.Module):
    """``(1, num_samples)`` to the mean of all its hidden states, ``(1, T, hidden)``."""

    def __init__(self, sizes: SemanticSizes):
        super().__init__()
        self.feature_extractor = _FeatureExtractor(sizes)
        self.feature_projection = _FeatureProjection(sizes)
        self.encoder = _Transformer(sizes)

    def forward(self, samples: Tensor) -> Tensor:
        """Encode; each position depends on the whole clip."""
        features = self.feature_extractor(samples[:, None])
        return self.encoder(self.feature_projection(features.transpose(1, 2)))


class _FeatureExtractor(nn.Module):
    def __init__(self, sizes: SemanticSizes):
        super().__init__()
        inputs = enumerate((1, *sizes.conv_dim[:-1]))
        layers = (_FeatureLayer(sizes, index, number) for index, number in inputs)
        self.conv_layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.conv_layers:
            x = layer(x)
        return x


class _FeatureLayer(nn.Module):
    """A convolution; the first one's output is normed over the whole clip."""

    def __init__(self, sizes: SemanticSizes, index: int, num_inputs: int):
        super().__init__()
        width = sizes.conv_dim[index]
        kernel, stride = sizes.conv_kernel[index], sizes.conv_stride[index]
        self.conv = nn.Conv1d(num_inputs, width, kernel, stride, bias=sizes.conv_bias)
        self.layer_norm = nn.Identity() if index else nn.GroupNorm(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.layer_norm(self.conv(x)))


class _FeatureProjection(nn.Module):
    def __init__(self, sizes: SemanticSizes):
        super().__init__()
        width = sizes.conv_dim[-1]
        if sizes.feat_proj_layer_norm:
            self.layer_norm = nn.LayerNorm(width, eps=sizes.layer_norm_eps)
        else:
            self.layer_norm = nn.Identity()
        self.projection = nn.Linear(width, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.layer_norm(x))


class _Transformer(nn.Module):
    def __init__(self, sizes: SemanticSizes):
        super().__init__()
        self.pos_conv_embed = _Positions(sizes)
        self.layer_norm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        layers = [_Layer(sizes) for _ in range(sizes.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(x + self.pos_conv_embed(x))
        states = [x]
        for layer in self.layers:
            states.append(x := layer(x))
        return torch.stack(states, dim=1).mean(dim=1)


class _Positions(nn.Module):
    """A wide convolution, the only positional encoding.

    Its weight is kept as norm and direction until `multiply_out` is called.
    """

    def __init__(self, sizes: SemanticSizes):
        super().__init__()
        width, kernel = sizes.hidden_size, sizes.num_conv_pos_embeddings
        groups = sizes.num_conv_pos_embedding_groups
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=groups)
        shape = self.conv.weight.shape
        del self.conv.weight
        self.conv.weight_g = nn.Parameter(torch.empty(1, 1, kernel))
        self.conv.weight_v = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        num_places = x.shape[1]
        # A kernel of even width gives one position too many.
        return gelu(self.conv(x.transpose(1, 2))[:, :, :num_places]).transpose(1, 2)

    def multiply_out(self) -> None:
        parts.multiply_out(self.conv, 2)


class _Layer(nn.Module):
    def __init__(self, sizes: SemanticSizes):
        super().__init__()
        hidden, eps = sizes.hidden_size, sizes.layer_norm_eps
        self.attention = _Attention(hidden, sizes.num_attention_heads)
        self.layer_norm = nn.LayerNorm(hidden, eps=eps)
        self.feed_forward = _FeedForward(hidden, sizes.intermediate_size)
        self.final_layer_norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(x + self.attention(x))
        return self.final_layer_norm(x + self.feed_forward(x))


class _Attention(nn.Module):
    def __init__(self, hidden: int, num_heads: int):
        super().__init__()
        self._num_heads = num_heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden)
        self.v_proj = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self._num_heads, -1)
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        heads = (each.view(shape).transpose(1, 2) for each in projected)
        mixed = scaled_dot_product_attention(*heads)
        return self.out_proj(mixed.transpose(1, 2).reshape(x.shape))


class _FeedForward(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.intermediate_dense = nn.Linear(hidden, intermediate)
        self.output_dense = nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_dense(gelu(self.intermediate_dense(x)))


class SemanticEncoder(nn.Module):
    """``(1, hidden, num_frames)`` of HuBERT to the semantic input of the quantizer."""

    def __init__(self, sizes: TokenizerSizes):
        super().__init__()
        width = sizes.semantic_model_config.hidden_size
        kernel = sizes.kernel_size
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, bias=False)
        blocks: list[nn.Module] = []
        given = width
        for ratio, stride in zip(sizes.channel_ratios, sizes.strides, strict=True):
            blocks.append(_SemanticBlock(sizes, given, int(width * ratio), stride))
            given = int(width * ratio)
        self.conv_blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Encode; only ``strides`` change the length."""
        x = self.conv(x)
        for block in self.conv_blocks:
            x = block(x)
        return x


class _SemanticBlock(nn.Module):
    def __init__(self, sizes: TokenizerSizes, inputs: int, outputs: int, stride: int):
        super().__init__()
        kernel = sizes.unit_kernel_size
        units = [_SemanticUnit(inputs, kernel, dil) for dil in sizes.block_dilations]
        self.res_units = nn.ModuleList(units)
        width = 3 if stride == 1 else 2 * stride
        self.conv = nn.Conv1d(inputs, outputs, width, stride, padding=(width - 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.res_units:
            x = unit(x)
        return self.conv(x)


class _SemanticUnit(nn.Module):
    def __init__(self, width: int, kernel: int, dilation: int):
        super().__init__()
        padding = (kernel - 1) // 2 * dilation
        self.conv1 = nn.Conv1d(
            width, width, kernel, padding=padding, dilation=dilation, bias=False
        )
        self.conv2 = nn.Conv1d(width, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(elu(self.conv1(elu(x))))
