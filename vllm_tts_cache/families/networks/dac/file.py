"""Reading ``codec.pth``, in every spelling that is about."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import remove_weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from vllm_tts_cache.families.networks.torch_file import only_tensors, read_torch_file

_GENERATOR = "generator"
# torch has had two names for the norm and the direction of a weight. The codec uses
# both, in different layers, and files were written with either.
_WEIGHT_NORM = (
    (".weight_g", ".parametrizations.weight.original0"),
    (".weight_v", ".parametrizations.weight.original1"),
)


def read_codec_file(path: Path) -> dict[str, Tensor]:
    """The codec's tensors under their own names, on the CPU, in the file's dtypes.

    The file is the plain state dict, or holds it under ``generator``, or is that of a
    training, whose names begin with ``generator.`` beside other networks'. What is no
    tensor, a step count say, is left out. Tensors may be views of the file: copy what
    is kept.

    Raises:
        CheckpointError: It cannot be read, or holds something else.
    """
    state = read_torch_file(path, wrappers=("state_dict", _GENERATOR))
    prefix = f"{_GENERATOR}."
    if any(name.startswith(prefix) for name in state):
        state = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix)
        }
    return only_tensors(state)


def in_the_spelling_of(
    names: Iterable[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The same tensors, with weight norms called as they are in ``names``."""
    renamed: dict[str, str] = {}
    for name in names:
        for old, new in _WEIGHT_NORM:
            if name.endswith(new):
                renamed[name.removesuffix(new) + old] = name
            elif name.endswith(old):
                renamed[name.removesuffix(old) + new] = name
    # A file that has both keeps both, so that the one too many is named.
    return {
        name if (own := renamed.get(name, name)) in tensors else own: tensor
        for name, tensor in tensors.items()
    }


def fix_weight_norms(codec: nn.Module) -> None:
    """Multiply them out once; on the device, because the host does it there."""
    with torch.no_grad():
        for module in codec.modules():
            if is_parametrized(module, "weight"):
                remove_parametrizations(module, "weight", leave_parametrized=True)
            elif hasattr(module, "weight_g"):
                remove_weight_norm(module)
    codec.requires_grad_(False)
