"""On the CPU platform a token's attention does not depend on how its prompt is cut."""

import pytest
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_tts_cache.platforms.cpu_kernels import single_queries
from vllm_tts_cache.platforms.cpu_worker import use_invariant_attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 32
DTYPE = torch.bfloat16
LENGTH = 900  # beyond what one tile of the kernel holds, on any processor seen


@pytest.fixture(scope="module", autouse=True)
def kernels():
    current_platform.import_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "1")  # vLLM's default; put back after
        torch.cpu._init_amx()  # on processors that have it, as a worker does
        use_invariant_attention()
        yield


def batch(spans):
    """Metadata of requests that each have queries ``[start, end)`` of their tokens."""
    counts = torch.tensor([end - start for start, end in spans])
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    num_tokens = int(starts[-1])
    blocks = torch.arange(-(-LENGTH // BLOCK), dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32),
        num_reqs=len(spans),
        num_actual_tokens=num_tokens,
        max_query_len=int(counts.max()),
        max_seq_len=max(end for _, end in spans),
        block_table_tensor=blocks.repeat(len(spans), 1),
        slot_mapping=torch.arange(num_tokens),
    )


@pytest.fixture(scope="module")
def tokens():
    generator = torch.Generator().manual_seed(0)

    def random(heads):
        return torch.randn(LENGTH, heads, HEAD_DIM, generator=generator).to(DTYPE)

    return random(HEADS), random(KV_HEADS), random(KV_HEADS)


@pytest.fixture(scope="module")
def attend(tokens):
    queries, keys, values = tokens
    isa = _get_attn_isa(DTYPE, BLOCK, HEAD_DIM)
    shape = (-(-LENGTH // BLOCK), KV_HEADS, BLOCK, HEAD_DIM)
    cached = [torch.zeros(shape, dtype=DTYPE) for _ in range(2)]
    slots = torch.arange(LENGTH)
    ops.cpu_attn_reshape_and_cache(keys, values, cached[0], cached[1], slots, isa)

    def run(metadata, spans):
        given = torch.cat([queries[start:end] for start, end in spans])
        output = torch.empty_like(given)
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=metadata.num_reqs,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            seq_lens=metadata.seq_lens,
            dtype=DTYPE,
            query_start_loc=metadata.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,  # as the host builds it
        )
        ops.cpu_attention_with_kv_cache(
            query=given,
            key_cache=cached[0],
            value_cache=cached[1],
            output=output,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            scale=HEAD_DIM**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=metadata.block_table_tensor,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )
        return output

    return run


def cut(*ends):
    return list(zip((0, *ends), (*ends, LENGTH), strict=True))


@pytest.mark.parametrize(
    "chunks",
    [cut(1), cut(31, 64), cut(768), cut(300, 307, 899), cut(*range(128, 900, 128))],
    ids=["one", "odd", "prefix", "unaligned", "chunks"],
)
def test_chunks_of_a_prompt_are_the_whole_bit_for_bit(attend, chunks):
    whole = attend(single_queries(batch([(0, LENGTH)])), [(0, LENGTH)])
    parts = [attend(single_queries(batch([span])), [span]) for span in chunks]
    assert torch.equal(torch.cat(parts), whole)


def test_a_neighbour_in_the_batch_changes_nothing(attend):
    spans = [(850, LENGTH), (0, 700), (LENGTH - 1, LENGTH)]
    together = attend(single_queries(batch(spans)), spans)
    alone = [attend(single_queries(batch([span])), [span]) for span in spans]
    assert torch.equal(together, torch.cat(alone))


def test_it_is_the_attention_that_the_kernel_computes(attend, tokens):
    queries, keys, values = (part.float().transpose(0, 1) for part in tokens)
    keys, values = (part.repeat_interleave(2, dim=0) for part in (keys, values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True
    )[0].transpose(0, 1)
    ours = attend(single_queries(batch([(0, LENGTH)])), [(0, LENGTH)])
    assert torch.allclose(ours.float(), expected, atol=0.02)
