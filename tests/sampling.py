"""What vLLM tells a model that samples by itself."""

from dataclasses import replace

import torch


def greedy(num_rows):
    """The largest of each row's logits."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    nothing = torch.empty(0)
    return SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(num_rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def drawing(num_rows, generators):
    """Draw from each row's logits, by the generators of the rows that have one."""
    return replace(
        greedy(num_rows),
        temperature=torch.ones(num_rows),
        all_greedy=False,
        generators=generators,
    )
