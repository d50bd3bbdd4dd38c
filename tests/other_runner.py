"""The host's second model runner (MRV2) as far as it prepares prefills.

Its kernels need Triton and so a GPU. What our talkers rely on does not: the host's own
model state and request buffer, which call ``preprocess``. Here they are driven with
batches as the runner's scheduler would hand them in.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm_omni.core.sched.output import OmniNewRequestData
from vllm_omni.engine.serialization import serialize_additional_information
from vllm_omni.worker_v2.model_states.intermediate_buffer import OmniIntermediateBuffer
from vllm_omni.worker_v2.model_states.omni_model_state import OmniModelState

MAX_NUM_REQS = 4


class OtherRunner:
    """Prefills of several requests at once, by the host's code."""

    def __init__(self, model: Any):
        # Without its constructor, which allocates what a GPU's forward pass needs.
        self._state = OmniModelState.__new__(OmniModelState)
        self._state.model = model
        self._state.has_preprocess = model.has_preprocess
        self._state.intermediate_buffer = OmniIntermediateBuffer(MAX_NUM_REQS)
        self._state._static_inputs_embeds = None
        self._model = model
        self._prompt_len = np.zeros(MAX_NUM_REQS, np.int64)
        self._num_computed = np.zeros(MAX_NUM_REQS, np.int64)
        self._ids: dict[int, torch.Tensor] = {}

    def add(self, index: int, request_id: str, token_ids: torch.Tensor, info: Any):
        """Take a request in, its information as it crosses to the engine."""
        payload = serialize_additional_information(dict(info))
        request = OmniNewRequestData(
            req_id=request_id,
            prompt_token_ids=token_ids.tolist(),
            mm_features=[],
            sampling_params=None,
            pooling_params=None,
            block_ids=(),
            num_computed_tokens=0,
            lora_request=None,
            additional_information=payload,
        )
        self._state.intermediate_buffer.add_request(index, request)
        self._ids[index] = token_ids
        self._prompt_len[index], self._num_computed[index] = len(token_ids), 0

    def left_by(self, index: int) -> dict[str, Any]:
        """What a request keeps between its steps."""
        return self._state.intermediate_buffer.buffers[index]

    @torch.inference_mode()  # as the runner's `execute_model`
    def prefill(self, chunk: int) -> dict[int, torch.Tensor]:
        """Prefill all by steps of so many tokens; (tokens, hidden size) by index."""
        parts: dict[int, list[torch.Tensor]] = {index: [] for index in self._ids}
        while scheduled := self._next(chunk):
            for index, embeds in self._step(scheduled).items():
                parts[index].append(embeds)
        return {index: torch.cat(found) for index, found in parts.items()}

    def _next(self, chunk: int) -> dict[int, int]:
        left = self._prompt_len - self._num_computed
        return {i: min(chunk, int(left[i])) for i in self._ids if left[i]}

    def _step(self, scheduled: Mapping[int, int]) -> dict[int, torch.Tensor]:
        counts = list(scheduled.values())
        ids = torch.cat([self._ids_of(i, count) for i, count in scheduled.items()])
        batch = SimpleNamespace(
            num_reqs=len(scheduled),
            num_tokens=len(ids),
            input_ids=ids,
            idx_mapping_np=np.array(list(scheduled)),
            num_scheduled_tokens=np.array(counts),
            query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
        )
        states: Any = SimpleNamespace(
            prompt_len=SimpleNamespace(np=self._prompt_len),
            num_computed_tokens=SimpleNamespace(np=self._num_computed),
        )
        inputs: dict[str, Any] = {}
        self._state.run_preprocess(batch, inputs, states)  # type: ignore[arg-type]
        for index, count in scheduled.items():
            self._num_computed[index] += count
        return dict(zip(scheduled, inputs["inputs_embeds"].split(counts), strict=True))

    def _ids_of(self, index: int, count: int) -> torch.Tensor:
        begin = int(self._num_computed[index])
        return self._ids[index][begin : begin + count]
