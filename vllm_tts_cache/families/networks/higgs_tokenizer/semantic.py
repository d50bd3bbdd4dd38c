"""HuBERT, the semantic half of the tokenizer, of transformers' layers.

Transformers' loop over them is not used: it draws a random number for each layer, even
without dropout, and an encode beside the decode loop would shift the draws of unseeded
requests.

Source: ``HubertModel`` and ``HiggsAudioV2TokenizerModel`` of transformers 5.14, to
which it is equal bit for bit on a CPU; its parameters have the file's names.
"""

from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import HubertConfig
from transformers.models.hubert import modeling_hubert as hubert

from vllm_tts_cache.families.networks import parts
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import SemanticSizes


class Hubert(nn.Module):
    """``(1, num_samples)`` to the mean of all its hidden states, ``(1, T, hidden)``."""

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

    def multiply_out(self) -> None:
        parts.multiply_out(self.conv, 2)
