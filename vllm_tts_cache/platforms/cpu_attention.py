"""Attention on the CPU whose result does not depend on how a prompt was cut.

vLLM's kernel takes the keys in tiles that it sizes by the number of queries and by the
processor's cache, and each tile rounds once more. So beyond some hundred keys a token
gets other bits in a whole prefill than in a chunk of one, or behind a prefix that came
from the cache; and the audio that is sampled from them differs. Handing every token in
as a request of its own makes all of them what a decode step is: one query, all keys.

For 800 tokens this takes about twice as long (12 ms and 22 ms a layer of four heads,
one thread, where it was measured).
"""

import dataclasses

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)


class InvariantCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's backend with the metadata of single queries."""

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the builder below."""
        return _Builder


class _Builder(CPUAttentionMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
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
