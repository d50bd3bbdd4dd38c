"""A loaded tokenizer: samples to codes, and the identity of what it computes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_tts_cache.families.networks.higgs_tokenizer.network import (
    SEMANTIC_PADDING,
    HiggsNetwork,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import (
    CONFIG,
    TokenizerSizes,
    sizes_of,
)
from vllm_tts_cache.speaker.checkpoint import (
    assign_float32,
    encoder_fingerprint,
    read_tensors,
)
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.speaker.reference import MemoryNeed

NETWORK = "higgs audio tokenizer"
# Raise it with any change here that changes what the network computes.
REVISION = 1
# What brings the samples to HuBERT's rate, whatever brought the clip to ours.
SEMANTIC_RESAMPLER = "torchaudio sinc_interp_hann"

# Of the network's first and largest outputs, float32, four are there at a time, and
# half as many again are declared; see docs/gpu.md.
_NUM_AT_A_TIME = 6

_ENCODE_SIDE = (
    "acoustic_encoder.",
    "semantic_model.",
    "encoder_semantic.",
    "fc.",
    "quantizer.",
)
# What only a training needs of it.
_NOT_READ = (
    "masked_spec_embed",
    "codebook.inited",
    "codebook.cluster_size",
    "codebook.embed_avg",
)
# Two ways of torch to keep a weight as norm and direction; HuBERT has one such.
_NORMED = {
    "parametrizations.weight.original0": "weight_g",
    "parametrizations.weight.original1": "weight_v",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HiggsTokenizer:
    """What a family's encoder asks for codes.

    Attributes:
        fingerprint: Over the network and over what the family does before.
        need: What an encode takes.
    """

    network: HiggsNetwork
    device: torch.device
    sizes: TokenizerSizes
    fingerprint: str
    need: MemoryNeed

    def codes(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
        """Encode mono samples at ``sizes.sample_rate``.

        Returns:
            ``(num_frames, num_codebooks)``, the coarsest first.

        Raises:
            RuntimeError, ValueError: Torch's, where it fails on them.
            EncodeError: Float32 is not exact meanwhile.
        """
        with exact_float32(self.device):
            waveform = torch.tensor(samples, device=self.device).view(1, 1, -1)
            codes = self.network(waveform).cpu()
        return np.ascontiguousarray(codes.numpy().T.astype(np.int16))


def load_higgs_tokenizer(
    directory: Path,
    device: torch.device,
    *,
    resampler: str,
    preparation: Mapping[str, Any],
) -> HiggsTokenizer:
    """Load its encode side, in float32 and in memory of its own.

    Args:
        directory: ``audio_tokenizer`` of a checkpoint: a config and its weights.
        device: Where it computes.
        resampler: What the family brings clips to 24 kHz with.
        preparation: All else that it does with a clip before; JSON types, and its
            revision among them. Families that do the same share encodings.

    Raises:
        CheckpointError: It is not this tokenizer, or a tensor is missing or of another
            shape; the message names it.
    """
    config = directory / CONFIG
    return build_higgs_tokenizer(
        sizes_of(read_json(config), path=str(config)),
        read_tensors(directory, ""),
        device,
        path=str(directory),
        resampler=resampler,
        preparation=preparation,
    )


def build_higgs_tokenizer(
    sizes: TokenizerSizes,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    *,
    path: str,
    resampler: str,
    preparation: Mapping[str, Any],
) -> HiggsTokenizer:
    """Build its encode side of tensors that a checkpoint has elsewhere.

    Args:
        sizes: Of it.
        tensors: By the names that they have in a folder of its own.
        device: Where it computes.
        path: Where they are from, for messages.
        resampler: As of `load_higgs_tokenizer`.
        preparation: Likewise.

    Raises:
        CheckpointError: A tensor is missing or of another shape.
    """
    with torch.device("meta"):
        network = HiggsNetwork(sizes)
    weights = _encode_side(tensors, sizes)
    weights = assign_float32(network, weights, path=f"{path}, the encode side")
    network.to(device)
    with torch.no_grad():
        network.multiply_out()  # on the device, as transformers does it
    return HiggsTokenizer(
        network=network,
        device=device,
        sizes=sizes,
        fingerprint=encoder_fingerprint(
            network=NETWORK,
            revision=REVISION,
            resampler=resampler,
            weights=weights,
            settings={
                **_settings(sizes),
                "semantic_padding": SEMANTIC_PADDING,
                "semantic_resampler": SEMANTIC_RESAMPLER,
                "preparation": dict(preparation),
            },
        ),
        need=_need(sizes),
    )


def _encode_side(
    tensors: Mapping[str, Tensor], sizes: TokenizerSizes
) -> dict[str, Tensor]:
    """What the network runs on, under the names that it has for them."""
    # What the last codebook leaves over is not coded any more.
    last = f"quantizer.quantizers.{sizes.num_codebooks - 1}.project_out."
    return {
        _our_name(name): tensor
        for name, tensor in tensors.items()
        if name.startswith(_ENCODE_SIDE)
        and not name.endswith(_NOT_READ)
        and not name.startswith(last)
    }


def _our_name(name: str) -> str:
    for theirs, ours in _NORMED.items():
        name = name.replace(theirs, ours)
    return name


def _settings(sizes: TokenizerSizes) -> dict[str, Any]:
    settings = asdict(sizes)
    # Which decides nothing but how many codebooks there are.
    del settings["target_bandwidths"]
    return settings | {"num_codebooks": sizes.num_codebooks}


def _need(sizes: TokenizerSizes) -> MemoryNeed:
    """Of the half that takes more; they are computed one after the other."""
    acoustic, semantic = sizes.acoustic_model_config, sizes.semantic_model_config
    numbers_per_second = max(
        sizes.sample_rate * acoustic.encoder_hidden_size,
        sizes.semantic_sample_rate // semantic.conv_stride[0] * semantic.conv_dim[0],
    )
    return MemoryNeed(bytes_per_second=_NUM_AT_A_TIME * 4 * numbers_per_second)
