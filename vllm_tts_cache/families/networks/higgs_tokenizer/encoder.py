"""The encode side of a tokenizer: a clip to codes, and the identity of its network.

A clip is only resampled, as by Higgs Audio's own code; OmniVoice prepares it otherwise.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks.higgs_tokenizer import frames
from vllm_tts_cache.families.networks.higgs_tokenizer.network import (
    SEMANTIC_PADDING,
    HiggsNetwork,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import (
    CONFIG,
    TokenizerSizes,
    sizes_of,
)
from vllm_tts_cache.families.networks.resample import resample
from vllm_tts_cache.speaker import checkpoint
from vllm_tts_cache.speaker.checkpoint_dir import check_rates, read_json
from vllm_tts_cache.speaker.precision import encoding_exactly
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

CODEC = "codec"
NETWORK = "higgs audio tokenizer"
# Raise it with any change here that changes what the network computes.
REVISION = 1
# Resamples from our rate to HuBERT's, whatever resampled the clip to our rate.
SEMANTIC_RESAMPLER = "torchaudio sinc_interp_hann"
# A clip is only resampled. Families with equal preparation share encodings.
PREPARATION: dict[str, int] = {}

# Four of the network's first and largest outputs, float32, exist at a time, and half as
# many again are declared; see docs/gpu.md.
_NUM_AT_A_TIME = 6

_ENCODE_SIDE = (
    *("acoustic_encoder.", "semantic_model.", "encoder_semantic."),
    *("fc.", "quantizer."),
)
# Tensors that only training needs.
_NOT_READ = (
    *("masked_spec_embed", "codebook.inited"),
    *("codebook.cluster_size", "codebook.embed_avg"),
)
# Torch's newer and older names of a weight kept as norm and direction; HuBERT has one.
_NORMED = {
    "parametrizations.weight.original0": "weight_g",
    "parametrizations.weight.original1": "weight_v",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HiggsEncoder:
    """Gives ``codes``: ``(num_frames, 8)`` int16, the coarsest first; not delayed.

    Its fingerprint covers the family's preparation of a clip, too.
    """

    network: HiggsNetwork
    device: torch.device
    sizes: TokenizerSizes
    fingerprint: str
    name: str = CODEC

    @property
    def need(self) -> MemoryNeed:
        """See `ReferenceEncoder`."""
        return network_need(self.sizes)

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio. Raises: EncodeError if the network failed on this audio."""
        with encoding_exactly(self.device, "Higgs audio tokenizer"):
            samples = resample(audio, frames.SAMPLE_RATE_HZ)
            return Encoding({"codes": self.codes(samples)})

    def codes(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
        """Encode samples at ``sizes.sample_rate``, within `encoding_exactly`."""
        waveform = torch.tensor(samples, device=self.device).view(1, 1, -1)
        codes = self.network(waveform).cpu()
        return np.ascontiguousarray(codes.numpy().T.astype(np.int16))


def check_sizes(sizes: TokenizerSizes, *, path: Path) -> None:
    """Refuse a tokenizer that makes another number of frames of a clip than `frames`.

    The scheduler is told that number before the clip is encoded.

    Raises: CheckpointError.
    """
    check_rates(
        path,
        "{} Hz, {} samples a frame and {} codebooks of {}",
        found=(
            *(sizes.sample_rate, sizes.samples_per_frame),
            *(sizes.num_codebooks, sizes.codebook_size),
        ),
        known=(
            *(frames.SAMPLE_RATE_HZ, frames.SAMPLES_PER_FRAME),
            *(frames.NUM_CODEBOOKS, frames.CODEBOOK_SIZE),
        ),
    )


def load_higgs_encoder(
    directory: Path,
    device: torch.device,
    resampler: str,
    preparation: Mapping[str, Any] = PREPARATION,
    sizes: TokenizerSizes | None = None,
    prefix: str = "",
    kind: type[HiggsEncoder] = HiggsEncoder,
) -> HiggsEncoder:
    """Load a tokenizer's encode side, in float32 and in memory of its own.

    Args:
        directory: ``audio_tokenizer`` of a checkpoint: a config and its weights; or a
            checkpoint that has the weights among its own.
        device: Where it computes.
        resampler: Name of the family's resampler to 24 kHz.
        preparation: The family's other steps before an encode and their revision, in
            JSON types. Families with equal preparation share encodings.
        sizes: The tokenizer's sizes; None if the directory's config has them.
        prefix: What the names of the tokenizer's tensors begin with in the directory.
        kind: The family's encoder.

    Raises: CheckpointError: It is another tokenizer, or a tensor is missing or of
    another shape; the message names the tensor.
    """
    if sizes is None:
        config = directory / CONFIG
        sizes = sizes_of(read_json(config), path=str(config))
    tensors = checkpoint.read_tensors(directory, prefix)
    with torch.device("meta"):
        network = HiggsNetwork(sizes)
    path = f"{directory}{f' {prefix}*' if prefix else ''}, the encode side"
    weights = _encode_side(tensors, sizes)
    weights = checkpoint.assign_float32(network, weights, path=path)
    network.to(device)
    with torch.no_grad():
        network.multiply_out()  # on the device, as transformers does it
    settings: dict[str, Any] = {
        **asdict(sizes),
        "num_codebooks": sizes.num_codebooks,
        "semantic_padding": SEMANTIC_PADDING,
        "semantic_resampler": SEMANTIC_RESAMPLER,
        "preparation": dict(preparation),
    }
    del settings["target_bandwidths"]  # they decide only how many codebooks there are
    fingerprint = checkpoint.encoder_fingerprint(
        NETWORK, REVISION, resampler, weights, settings
    )
    return kind(network=network, device=device, sizes=sizes, fingerprint=fingerprint)


def _encode_side(
    tensors: Mapping[str, Tensor], sizes: TokenizerSizes
) -> dict[str, Tensor]:
    """Return the tensors that the network uses, under its own names."""
    # The residual of the last codebook is not coded.
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


def network_need(sizes: TokenizerSizes) -> MemoryNeed:
    """Return the need of the larger half; the halves run one after the other."""
    acoustic, semantic = sizes.acoustic_model_config, sizes.semantic_model_config
    numbers_per_second = max(
        sizes.sample_rate * acoustic.encoder_hidden_size,
        sizes.semantic_sample_rate // semantic.conv_stride[0] * semantic.conv_dim[0],
    )
    return MemoryNeed(bytes_per_second=_NUM_AT_A_TIME * 4 * numbers_per_second)
