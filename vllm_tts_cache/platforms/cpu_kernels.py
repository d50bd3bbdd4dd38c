"""Attention and layers for the CPU, where a row's bits do not depend on its batch.

vLLM's attention kernel splits the keys into tiles by the number of queries and the
processor's cache, and each tile rounds once more. So beyond some hundred keys a token
gets other bits in a whole prefill than in a chunk or after a cached prefix, and the
sampled audio differs. Here every token is a request of its own, with one query and all
keys, as in a decode step. For 800 tokens that takes about twice as long (22 ms instead
of 12 ms for a layer of four heads, on one thread).

oneDNN chooses its kernel by the number of rows, and each kernel rounds in its own way.
Measured: without bfloat16 instructions (AVX-512 alone) a single row, or the last row of
a thread's uneven share, gets other bits than the same row among others; with them a
single row does at a real checkpoint's sizes; with AMX, rows in batches of 33 and more.
So every multiplication has one number of rows here, padded with zeros. A row's bits can
then depend on its place only; each layer tests that they do not, at its first use.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn

from vllm_tts_cache import patch_once

Multiply = Callable[[torch.Tensor], torch.Tensor]

# Eight rows cost a decode step little, as the weights are read once for all rows. The
# others are for threads that share eight rows unevenly.
BLOCK_SIZES = (8, 16, 32, 64)
# Of thousands of outputs that are summed in another order, one or two differ after
# rounding to bfloat16.
_NUM_OUTPUTS_TRIED = 1 << 17
_FUSED = "_fused_qkv_weight"
# The host's class for all codebooks' heads of Higgs Audio v3, which is no torch layer.
_HEADS = "HiggsFusedMultiTextHead"

MAX_ISA = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_MATRICES = "AVX512_CORE_BF16"
# oneDNN's names of instruction sets without bfloat16.
_WITHOUT_BFLOAT16 = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI"),
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)


def leave_out_matrices() -> None:
    """Keep oneDNN from AMX, unless the environment already limits it.

    Its AMX kernels round a row differently in larger batches. oneDNN reads the limit at
    its first use, so this comes before the model is built.
    """
    if not torch.cpu._is_amx_tile_supported():
        return
    # Linux kills a process that uses AMX's tile registers, as vLLM's attention does,
    # without asking (SIGILL). oneDNN asks, but not under this limit.
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()
    os.environ.setdefault(MAX_ISA, _WITHOUT_MATRICES)  # noqa: TID251  oneDNN reads it
    if os.environ[MAX_ISA].upper() in _WITHOUT_BFLOAT16:  # noqa: TID251
        # vLLM multiplies by packed weights on each processor with AMX. oneDNN has no
        # kernel for that under such a limit, and aborts the process.
        patch_once(utils, "check_cpu_sgl_kernel", lambda _: lambda *_args: False)


class InvariantCPUAttentionBackend(cpu_attn.CPUAttentionBackend):
    """vLLM's backend with the metadata of single queries."""

    @staticmethod
    def get_builder_cls() -> type[cpu_attn.CPUAttentionMetadataBuilder]:
        """Return the builder whose metadata are those of single queries."""
        return _Builder


class _Builder(cpu_attn.CPUAttentionMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> cpu_attn.CPUAttentionMetadata:
        is_decoder = not (self.is_cross_attention or self.is_encoder_only_attention)
        if is_decoder and common_attn_metadata.causal is True:
            common_attn_metadata = single_queries(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


def single_queries(whole: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the metadata of a batch with each query token as its own request.

    Causal attention of query ``i`` of a request that has ``n`` queries and ends at
    ``seq_len`` is that of one query which ends at ``seq_len - n + i + 1``.
    """
    if whole.max_query_len <= 1:
        return whole
    starts = whole.query_start_loc[: whole.num_reqs + 1].long()
    counts = starts.diff()
    request = torch.repeat_interleave(torch.arange(whole.num_reqs), counts)
    token = torch.arange(int(starts[-1]))
    behind = starts[1:][request] - token - 1
    each = torch.arange(len(token) + 1, dtype=whole.query_start_loc.dtype)
    return dataclasses.replace(
        whole,
        num_reqs=len(token),
        max_query_len=1,
        query_start_loc=each,
        query_start_loc_cpu=each,
        seq_lens=(whole.seq_lens[request] - behind).to(whole.seq_lens.dtype),
        block_table_tensor=whole.block_table_tensor[request],
    )


def separate_rows(model: nn.Module) -> None:
    """Make a row's bits independent of its batch, in all layers but attention."""
    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            patch_once(module, "forward", dense_positions)
        elif isinstance(module, nn.Linear):
            patch_once(module, "forward", SeparateRows)
        elif hasattr(module, "cpu_linear"):  # the kernel that vLLM chose for the layer
            patch_once(module, "cpu_linear", SeparateRows)
        elif type(module).__name__ == _HEADS:
            patch_once(module, "generate", SeparateRows)
    for module in model.modules():
        # The host joins weights of VoxCPM2 that it multiplies without a layer.
        fuse: Any = getattr(module, "precompute_fused_qkv", None)
        if fuse is not None:
            fuse()
        if isinstance(weight := getattr(module, _FUSED, None), torch.Tensor):
            setattr(module, _FUSED, SeparateWeight.of(weight))


def dense_positions(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rotary embedding that accepts positions with gaps between in memory.

    vLLM's kernel assumes contiguous ones. The positions of Fish Speech's fast AR are a
    column of a table: the kernel would turn all rows but the first by a wrong one.
    """
    return lambda positions, *others: rotate(positions.contiguous(), *others)


class SeparateRows:
    """A layer's multiplication, in blocks of one size; the last is padded with zeros.

    Args:
        multiply: Takes rows ``(num_rows, num_inputs)`` and the layer's other arguments.
    """

    def __init__(self, multiply: Callable[..., torch.Tensor]):
        self._multiply = multiply
        self._block_size: int | None = None

    def __call__(self, inputs: torch.Tensor, *others: Any) -> torch.Tensor:
        """Multiply ``(..., num_inputs)``; a row's output may have any dimensions."""

        def multiply(block: torch.Tensor) -> torch.Tensor:
            return self._multiply(block, *others)

        rows = inputs.reshape(-1, inputs.shape[-1])
        if self._block_size is None:
            self._block_size = choose_block_size(multiply, rows)
        num_rows, size = len(rows), self._block_size
        if num_missing := -num_rows % size:
            rows = nn.functional.pad(rows, (0, 0, 0, num_missing))
        parts = [multiply(block) for block in rows.split(size)]
        outputs = (parts[0] if len(parts) == 1 else torch.cat(parts))[:num_rows]
        return outputs.reshape(*inputs.shape[:-1], *outputs.shape[1:])


class SeparateWeight(torch.Tensor):
    """A weight for `nn.functional.linear`, which multiplies in blocks of one size."""

    _separate: SeparateRows

    @classmethod
    def of(cls, weight: torch.Tensor) -> "SeparateWeight":
        """Wrap a weight, in the same memory."""
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
        """Multiply in blocks; return plain tensors from other functions."""
        del types
        match func, args:
            case nn.functional.linear, (inputs, SeparateWeight() as weight):
                return weight._separate(inputs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def choose_block_size(multiply: Multiply, like: torch.Tensor) -> int:
    """Find a block size in which a row's bits do not depend on its place; else 1."""
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
