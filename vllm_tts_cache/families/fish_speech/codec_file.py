"""Reading ``codec.pth``, in every spelling that is about."""

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 -- torch raises it; nothing is unpickled
from typing import Any

import torch
from torch import Tensor

from vllm_tts_cache.errors import CheckpointError

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
    training, whose names begin with ``generator.`` beside other networks'. Tensors
    may be views of the file: copy what is kept.

    Raises:
        CheckpointError: It cannot be read, or holds something else.
    """
    state = _load(path)
    for wrapper in ("state_dict", _GENERATOR):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping):
        raise CheckpointError(str(path), "it does not hold a state dict")
    prefix = f"{_GENERATOR}."
    if any(str(name).startswith(prefix) for name in state):
        state = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if str(name).startswith(prefix)
        }
    strangers = [str(n) for n, value in state.items() if not isinstance(value, Tensor)]
    if strangers:
        raise CheckpointError(str(path), f"it holds no tensor under {strangers[0]}")
    return dict(state)


def _load(path: Path) -> Any:
    try:
        # Told apart here, since torch has other errors for what is no file.
        path.open("rb").close()
        return torch.load(  # noqa: TID251 -- the released form; weights_only runs no code
            path,
            map_location="cpu",
            weights_only=True,
            # Half of the file is for decoding, and need not be read. Files of torch
            # before 1.6 are no archives, which it cannot map.
            mmap=zipfile.is_zipfile(path),
        )
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    except (RuntimeError, ValueError, LookupError, EOFError, UnpicklingError) as exc:
        first_line = str(exc).partition("\n")[0]
        raise CheckpointError(str(path), f"not a torch file: {first_line}") from exc


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
    # A file that has both keeps both, so that the one too many is refused by name.
    return {
        name if (own := renamed.get(name, name)) in tensors else own: tensor
        for name, tensor in tensors.items()
    }
