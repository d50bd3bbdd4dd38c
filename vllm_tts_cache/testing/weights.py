"""Random weights that depend on a seed and on their own name, and on nothing else."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


class WeightBuilder:
    """Collects the named tensors of a state dict.

    Every tensor is drawn from a generator of its own, seeded with its full name:
    adding a layer, or writing them in another order, changes no other weight.
    """

    def __init__(
        self, seed: int, prefix: str = "", into: dict[str, Tensor] | None = None
    ):
        self._seed = seed
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {} if into is None else into

    def under(self, prefix: str) -> "WeightBuilder":
        """A view that puts ``prefix`` and a dot before every name."""
        return WeightBuilder(self._seed, f"{self._prefix}{prefix}.", self.tensors)

    def normal(self, name: str, shape: Sequence[int], std: float) -> Tensor:
        """Add ``name``, float32, drawn from N(0, std^2)."""
        return self._add(
            name, torch.randn(shape, generator=self._generator(name)) * std
        )

    def log_uniform(
        self, name: str, shape: Sequence[int], low: float, high: float
    ) -> Tensor:
        """Add ``name``, float32, its logarithm uniform in [low, high)."""
        draw = torch.rand(shape, generator=self._generator(name))
        return self._add(name, torch.exp(low + (high - low) * draw))

    def projection(self, name: str, shape: Sequence[int], gain: float = 1.0) -> Tensor:
        """Add a linear or convolution weight ``(out, in, ...)``.

        Inputs of unit variance come out with a standard deviation of ``gain``.
        """
        return self.normal(name, shape, gain / math.sqrt(math.prod(shape[1:])))

    def centred(self, name: str, shape: Sequence[int], gain: float = 1.0) -> Tensor:
        """Add a projection that is blind to what all its inputs have in common.

        Random layers behind a rectifier, or behind log-mel energies, otherwise
        pass on mostly a constant, under which all inputs come out alike.
        """
        weight = self.projection(name, shape, gain)
        weight -= weight.mean(dim=tuple(range(1, len(shape))), keepdim=True)
        return weight

    def fill(self, name: str, shape: Sequence[int], value: float) -> Tensor:
        """Add ``name``, float32, constant."""
        return self._add(name, torch.full(tuple(shape), value))

    def _add(self, name: str, tensor: Tensor) -> Tensor:
        self.tensors[self._prefix + name] = tensor
        return tensor

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{self._prefix}{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def save_weights(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write a safetensors file that transformers and vLLM accept."""
    cast = {name: tensors[name].to(dtype).contiguous() for name in sorted(tensors)}
    save_file(cast, path, metadata={"format": "pt"})
