"""Talkers of models that sample by themselves, whatever the logits say."""

from typing import Any

import torch

from vllm_tts_cache.model_executor.talker import CachedTalker


class SamplingTalker(CachedTalker):
    """Ends a failed request behind the host's sampler, and not in its logits.

    Such a sampler draws from the ids that the model speaks with. Where none of them is
    left, it would fail, and every request of the step with it.
    """

    def compute_logits(self, hidden_states: Any, sampling_metadata: Any = None) -> Any:
        """As the host; how a failed request ends is for `sample` to say."""
        self._suspect_prefixes.end_step()  # all of its prefills were built
        host: Any = super(CachedTalker, self)
        return host.compute_logits(hidden_states, sampling_metadata)

    def sample(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        """Sample as the host does, but for the id that ends a failed request."""
        host: Any = super()
        output = host.sample(logits, sampling_metadata)
        if output is not None:
            sampled = output.sampled_token_ids
            self._failed_requests.force(sampled, self._requests_of_rows)
        elif logits is not None:  # vLLM samples next, by the logits
            self._failed_requests.end(logits, self._requests_of_rows)
        return output
