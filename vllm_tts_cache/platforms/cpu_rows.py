"""A model on the CPU whose rows do not depend on which others are in their batch.

oneDNN chooses its kernel by the number of rows, and each kernel rounds in its own way.
Measured: without bfloat16 instructions (AVX-512 alone) a lone row, or the last one of
an uneven share of a thread, gets other bits than the same row among others; with them a
lone row does at a real checkpoint's sizes; with AMX, rows of batches of 33 and more.

So every multiplication has the same number of rows here, and what is missing is zeros.
A row then depends at most on its place among them; whether it does is tried for each
layer at its first use, on this very machine with its number of threads.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

Multiply = Callable[[torch.Tensor], torch.Tensor]

# Of the first a decode step feels little: the weights are read once for all rows. The
# others are for threads that share its rows unevenly.
BLOCK_SIZES = (8, 16, 32, 64)
# Of thousands of outputs that are summed in another order, one or two differ once they
# are rounded to bfloat16.
_NUM_OUTPUTS_TRIED = 1 << 17
_FUSED = "_fused_qkv_weight"
# Higgs Audio v3's host has all codebooks' heads in one, which is no layer of torch's.
_HEADS = frozenset({"HiggsFusedMultiTextHead"})


def separate_rows(model: nn.Module) -> None:
    """Have each layer of a loaded model give a row the same bits in any batch.

    Attention is not among them: see ``cpu_attention``.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            _replace(module, "forward", DensePositions)
        elif isinstance(module, nn.Linear):
            _replace(module, "forward", SeparateRows)
        elif hasattr(module, "cpu_linear"):  # the kernel that vLLM chose for a layer
            _replace(module, "cpu_linear", SeparateRows)
        elif type(module).__name__ in _HEADS:
            _replace(module, "generate", SeparateRows)
    for module in model.modules():
        # VoxCPM2's host puts weights together that it multiplies without a layer.
        fuse: Any = getattr(module, "precompute_fused_qkv", None)
        if fuse is not None:
            fuse()
        if isinstance(weight := getattr(module, _FUSED, None), torch.Tensor):
            setattr(module, _FUSED, SeparateWeight.of(weight))


def _replace(module: nn.Module, name: str, replacement: type) -> None:
    function = getattr(module, name)
    if not isinstance(function, replacement):
        setattr(module, name, replacement(function))


class DensePositions:
    """A rotary embedding whose positions may lie apart in memory.

    vLLM's kernel takes them to lie side by side. Those of Fish Speech's fast AR are a
    column of a table, so that all rows but a batch's first would be turned by another
    position than their own.
    """

    def __init__(self, rotate: Callable[..., Any]):
        self._rotate = rotate

    def __call__(self, positions: torch.Tensor, *others: Any) -> Any:
        """Turn queries and keys by their own positions."""
        return self._rotate(positions.contiguous(), *others)


class SeparateRows:
    """A layer's multiplication, in blocks of one size.

    Args:
        multiply: Of rows ``(num_rows, num_inputs)``, and what else the layer hands in.
    """

    def __init__(self, multiply: Callable[..., torch.Tensor]):
        self._multiply = multiply
        self._block_size: int | None = None

    def __call__(self, inputs: torch.Tensor, *others: Any) -> torch.Tensor:
        """Multiply ``(..., num_inputs)``; the bits of a row depend on it alone.

        What comes of a row may have several dimensions.
        """

        def multiply(block: torch.Tensor) -> torch.Tensor:
            return self._multiply(block, *others)

        rows = inputs.reshape(-1, inputs.shape[-1])
        if self._block_size is None:
            self._block_size = choose_block_size(multiply, rows)
        outputs = in_blocks(multiply, rows, self._block_size)
        return outputs.reshape(*inputs.shape[:-1], *outputs.shape[1:])


class SeparateWeight(torch.Tensor):
    """A weight that a model multiplies by without a layer, in blocks likewise."""

    _separate: SeparateRows

    @classmethod
    def of(cls, weight: torch.Tensor) -> "SeparateWeight":
        """Return the same weight, in the same memory."""
        if isinstance(weight, cls):
            return weight
        separate = weight.as_subclass(cls)
        separate._separate = SeparateRows(
            lambda rows: nn.functional.linear(rows, weight)
        )
        return separate

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Multiply in blocks; whatever else is done with it gives plain tensors."""
        del types
        match func, args:
            case nn.functional.linear, (inputs, SeparateWeight() as weight):
                return weight._separate(inputs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def in_blocks(multiply: Multiply, rows: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply ``size`` rows at a time, the last of them with zeros below."""
    num_rows = len(rows)
    if num_missing := -num_rows % size:
        rows = nn.functional.pad(rows, (0, 0, 0, num_missing))
    parts = [multiply(block) for block in rows.split(size)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[:num_rows]


def choose_block_size(multiply: Multiply, like: torch.Tensor) -> int:
    """Find how many rows to multiply at once so that a row's place does not matter.

    Args:
        multiply: Of rows ``(num_rows, num_inputs)``.
        like: Some rows, for their width and dtype.

    Returns: 1 where it matters in every size: then each row is multiplied alone.
    """
    return next((s for s in BLOCK_SIZES if not _place_matters(multiply, s, like)), 1)


def _place_matters(multiply: Multiply, size: int, like: torch.Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    num_tried = 0
    while num_tried < _NUM_OUTPUTS_TRIED:
        row = torch.randn(1, like.shape[1], generator=generator).to(like.dtype)
        outputs = multiply(row.repeat(size, 1))
        if not torch.equal(outputs, outputs[:1].expand_as(outputs)):
            return True
        num_tried += outputs[0].numel()
    return False
