"""What vLLM's attention is told of a batch."""

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


def batch_metadata(spans, table, slots):
    """Of requests that each have queries ``[start, end)`` of their tokens.

    ``table`` has each request's blocks, ``slots`` where each query's KV goes; None for
    one after the other.
    """
    counts = torch.tensor([end - start for start, end in spans])
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
    num_tokens = int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        num_reqs=len(spans),
        num_actual_tokens=num_tokens,
        max_query_len=int(counts.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=table,
        slot_mapping=torch.arange(num_tokens) if slots is None else slots,
    )
