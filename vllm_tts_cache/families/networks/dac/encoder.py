"""The encode half of a DAC: reference audio to the codes of an in-context clone.

The file ``codec.pth`` is read in all layouts and spellings of names in circulation.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import remove_weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks.sinc_resample import resample
from vllm_tts_cache.families.networks.torch_file import read_torch_file, tensors_under
from vllm_tts_cache.speaker.checkpoint import pick_tensors
from vllm_tts_cache.speaker.precision import encoding_exactly
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

_GENERATOR = "generator"
# torch has had two names for the norm and the direction of a weight. The codec uses
# both, in different layers, and files were written with either.
_WEIGHT_NORM = (
    (".weight_g", ".parametrizations.weight.original0"),
    (".weight_v", ".parametrizations.weight.original1"),
)

_COMPUTED = ("freqs_cis", "causal_mask")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DACEncoder:
    """Gives ``codes``: ``(num_frames, 10)`` int16, the semantic codebook first.

    Attributes:
        network: A codec network of the host, without its decode half.
        max_frames: Positions of the network's transformer before the quantizer.
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

        If the audio has several clips, each is encoded by itself, and their frames are
        joined in order. Source: fish-speech's server and its ``generate_long``.

        Raises: EncodeError: The network failed, or a clip has more than ``max_frames``.
        """
        try:
            with encoding_exactly(self.device, "codec encoder"):
                to = self.sample_rate_hz, self.device
                of_clips = [self._codes(resample(c, *to)) for c in audio.clips()]
                codes = torch.cat(of_clips, dim=1).cpu().numpy()
        finally:
            self.clean_up()
        return Encoding({"codes": codes.T.astype(np.int16)})

    def _codes(self, samples: Tensor) -> Tensor:
        """Return ``(10, num_frames)``, without the steps that only decoding needs."""
        num_frames = math.ceil(samples.numel() / self.samples_per_frame)
        if num_frames > self.max_frames:
            # On a GPU a position out of range would end the process.
            raise ValueError(f"{num_frames} frames are more than {self.max_frames}")
        missing = num_frames * self.samples_per_frame - samples.numel()
        latents = self.network.encoder(pad(samples, (0, missing)).view(1, 1, -1))
        quantizer = self.network.quantizer
        latents = quantizer.pre_module(quantizer.downsample(latents))
        semantic, semantic_codes, *_ = quantizer.semantic_quantizer(latents)
        _, residual_codes, *_ = quantizer.quantizer(latents - semantic)
        return torch.cat([semantic_codes, residual_codes], dim=1)[0]


def read_codec_file(path: Path) -> dict[str, Tensor]:
    """Return the codec's tensors by their own names, on the CPU, in the file's dtypes.

    The file is a state dict, or holds one under ``state_dict`` or ``generator``. In a
    training's file the codec's names begin with ``generator.``; other networks are left
    out, and so are entries that are no tensors, such as a step count. Tensors may be
    views of the file: copy what is kept.

    Raises: CheckpointError if the file cannot be read, or holds no state dict.
    """
    state = read_torch_file(path, wrappers=("state_dict", _GENERATOR))
    prefix = f"{_GENERATOR}."
    is_of_training = any(name.startswith(prefix) for name in state)
    return tensors_under(state, prefix if is_of_training else "")


def in_the_spelling_of(
    names: Iterable[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors with their weight norms in the spelling of ``names``."""
    renamed: dict[str, str] = {}
    for name in names:
        for old, new in _WEIGHT_NORM:
            if name.endswith(new):
                renamed[name.removesuffix(new) + old] = name
            elif name.endswith(old):
                renamed[name.removesuffix(old) + new] = name
    # If a file has both spellings, both stay, so that an error names the extra one.
    return {
        name if (own := renamed.get(name, name)) in tensors else own: tensor
        for name, tensor in tensors.items()
    }


def keep_half(
    codec: nn.Module, state: Mapping[str, Tensor], left_out: Iterable[str], *, path: str
) -> dict[str, Tensor]:
    """Delete parts of a codec; return the file's tensors of the others.

    Without those that the constructor computes, which a file may have. The whole file
    is checked, so that a truncated one is refused.

    Raises: CheckpointError if a tensor of the codec is missing or of another shape.
    """
    whole = codec.state_dict()
    state = in_the_spelling_of(whole, state)
    pick_tensors(_stored(whole), _stored(state), path=path)
    for name in left_out:
        owner, _, part = name.rpartition(".")
        delattr(codec.get_submodule(owner), part)
    return {name: state[name] for name in _stored(codec.state_dict())}


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if not n.endswith(_COMPUTED)}


def fix_weight_norms(codec: nn.Module) -> None:
    """Replace norms and directions by weights, on the codec's device as the host."""
    with torch.no_grad():
        for module in codec.modules():
            if is_parametrized(module, "weight"):
                remove_parametrizations(module, "weight", leave_parametrized=True)
            elif hasattr(module, "weight_g"):
                remove_weight_norm(module)
    codec.requires_grad_(False)
