"""CosyVoice3's two stages: a voice by content address, and each request its own.

The talker is told a reference's speech tokens, in the rows of its prompt; what the
decoder is told is in `conditioning`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm_omni.distributed.omni_connectors.utils.config import stage_sends_async_output
from vllm_omni.model_executor.models.cosyvoice3.cosyvoice3 import CosyVoice3Model
from vllm_omni.model_executor.models.output_templates import OmniOutput

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.cosyvoice3.conditioning import (
    CODES,
    EMBED,
    conditioning_of,
    handed_on,
    without_ours,
)
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, MEL, SPEAKER, TOKENS
from vllm_tts_cache.families.cosyvoice3.noise import fix_noise
from vllm_tts_cache.families.cosyvoice3.prompt import (
    count_positions,
    ids_of_request,
    tells_codes,
)
from vllm_tts_cache.families.networks.prompts import mode_of_request
from vllm_tts_cache.model_executor.talker import (
    CachedTalker,
    failing_alone,
    on_device,
    refuse_prefix_caching,
)
from vllm_tts_cache.speaker.reference import SpeakerRef

TALKER = "cosyvoice3_talker"
# What the runner keeps of each request of a step, in the batch's order.
BUFFER = "model_intermediate_buffer"


class _HostsModel(CosyVoice3Model):
    """The host's model, asked for its logits as other talkers are."""

    def compute_logits(
        self,
        hidden_states: Any,
        sampling_metadata: Any = None,  # noqa: ARG002  it has no use for it
    ) -> Tensor | None:
        return super().compute_logits(hidden_states)


class CachedCosyVoice3Model(CachedTalker, _HostsModel):
    """The host's model in either stage; only where a voice comes from is ours."""

    tts_cache_family = FAMILY

    # Prompts hold no audio, so the host's processor, which encodes it in the API
    # process and downloads a network for that, is never made.
    supports_multimodal = False
    supports_multimodal_raw_input_only = False

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        is_talker = vllm_config.model_config.model_stage == TALKER
        if is_talker:
            refuse_prefix_caching(vllm_config, FAMILY)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._tells_once = _sends_in_chunks(vllm_config.model_config)
        # The runner then has `preprocess` make the rows of each request.
        self.has_preprocess = is_talker

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the stage; the talker's loads our encoders, so no request pays."""
        if self.has_preprocess:
            return super().load_weights(weights)
        loaded = _HostsModel.load_weights(self, weights)
        fix_noise(self.code2wav.flow_model.decoder)
        # The host does in its first step, which waits for what is fetched for it.
        self._maybe_enable_code2wav_trt()
        return loaded

    @failing_alone
    def preprocess(
        self, input_ids: Tensor, input_embeds: Tensor | None, **info: Any
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Make the rows of a span: of the prompt, or of codes that were spoken."""
        del input_embeds
        begin = int(info.get("_omni_num_computed_tokens", 0))
        length = int(info.get("_omni_prompt_len", begin + len(input_ids)))
        if begin >= length:  # it decodes, or spoke so before it was preempted
            return input_ids, self._code_rows(input_ids), {}
        told = info.get(EMBED) or self._conditioning(info)
        prompt = self._prompt_rows(info, told[CODES][0], length, input_ids.device)
        if not info.get(EMBED):  # else a later chunk, or after a preemption
            self._count_prompt()
        rows = prompt[begin : begin + len(input_ids)]
        if len(rows) < len(input_ids):
            rows = torch.cat([rows, self._code_rows(input_ids[len(rows) :])])
        return input_ids, rows, {EMBED: told}

    def preprocess_decode_batch(
        self, *, input_ids: Tensor, req_infos: Sequence[Mapping[str, Any]]
    ) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        """Make the rows of neighbours that all decode: one look-up, as stock has."""
        return input_ids, self._code_rows(input_ids), [{} for _ in req_infos]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        additional_information: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute as the host; the talker's hidden states alone.

        What goes on to the decoder is put beside them in `make_omni_output`, which the
        runner calls for each step: this may be replayed from a CUDA graph.
        """
        if not self.has_preprocess and BUFFER in kwargs:
            kwargs[BUFFER] = [without_ours(info) for info in kwargs[BUFFER]]
        output = super().forward(
            input_ids,
            positions,
            intermediate_tensors,
            inputs_embeds,
            additional_information,
            **kwargs,
        )
        return output.text_hidden_states if self.has_preprocess else output

    def make_omni_output(self, model_outputs: Any, **kwargs: Any) -> OmniOutput:
        """Put beside a step's hidden states what the decoder is told of each one."""
        if isinstance(model_outputs, OmniOutput):
            return model_outputs
        told: Any = handed_on(kwargs.get(BUFFER) or (), once=self._tells_once)
        return OmniOutput(text_hidden_states=model_outputs, multimodal_outputs=told)

    def _conditioning(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """What the decoder is told, on the CPU and under the host's names.

        Raises: TTSCacheError, ValueError: it cannot be had, or is not such.
        """
        if (ref := SpeakerRef.from_info(info)) is None:
            raise TTSCacheError(
                "it names nobody, and this model has no voice of its own"
            )
        found = self._encodings(ref, mode_of_request(FAMILY, info).encoders)
        return conditioning_of(
            found[TOKENS][TOKENS],
            found[MEL][MEL],
            found[SPEAKER][SPEAKER],
            num_codes=self.config.llm["speech_token_size"],
        )

    def _prompt_rows(
        self,
        info: Mapping[str, Any],
        codes: Tensor,
        announced: int,
        device: torch.device,
    ) -> Tensor:
        """``(announced, hidden)``: start, texts, turn, and codes where they are told.

        Raises: TTSCacheError if it would have another length.
        """
        mode = mode_of_request(FAMILY, info)
        texts: Any = self.talker.llm.model
        ids = ids_of_request(info, texts.vocab_size)
        made = count_positions(mode, num_ids=len(ids), num_tokens=len(codes))
        if made != announced:
            raise TTSCacheError(
                f"its prompt has {made} positions and was announced with {announced}"
            )
        spoken = codes.tolist() if tells_codes(mode) else []
        marked = np.array([self.talker.sos, self.talker.task_id, *spoken])
        rows = self._code_rows(on_device(marked, device, torch.long))
        text_ids = on_device(np.array(ids), device, torch.long)
        return torch.cat([rows[:1], texts.embed_tokens(text_ids), rows[1:]])

    def _code_rows(self, ids: Tensor) -> Tensor:
        return self.talker.speech_embedding.weight[ids.to(torch.long)]

    def _passed_over(
        self,
        input_ids: Tensor,
        info: Mapping[str, Any],  # noqa: ARG002
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """A step of a failed request, whose first sampled id ends it."""
        table = self.talker.speech_embedding.weight
        zeros = table.new_zeros((len(input_ids), table.shape[1]))
        return input_ids, zeros, {}


def _sends_in_chunks(model_config: Any) -> bool:
    return bool(model_config.async_chunk) and stage_sends_async_output(model_config)
