"""CosyVoice3's two stages: each request gets its own voice, by content address.

In a zero-shot clone the rows of the talker's prompt hold the reference's speech tokens.
The decoder gets a conditioning on the voice: its tokens, its mel, its speaker's vector.

The host sends conditionings in the order of a step's *new* requests, and reads them by
place in the whole batch: beside a running request, two new ones speak with each other's
voice. Here each conditioning is stored in its request's info, which the runner keeps,
and is sent from there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm_omni.distributed.omni_connectors.utils.config import stage_sends_async_output
from vllm_omni.model_executor.models.cosyvoice3.code2wav_core import cfm
from vllm_omni.model_executor.models.cosyvoice3.cosyvoice3 import CosyVoice3Model
from vllm_omni.model_executor.models.output_templates import OmniOutput

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.cosyvoice3 import positions as counts
from vllm_tts_cache.families.cosyvoice3 import prompt as prompts
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, MEL, SPEAKER, TOKENS
from vllm_tts_cache.families.networks.prompts import MODE, check_length, mode_of_request
from vllm_tts_cache.model_executor import talker
from vllm_tts_cache.model_executor.talker import Built
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.store.encoding import Array

TALKER = "cosyvoice3_talker"
# The runner's infos of a step's requests, in the batch's order.
BUFFER = "model_intermediate_buffer"

# 300 s of speech and its reference; a speech takes at most 4,096 tokens, of 164 s.
MAX_FRAMES = 50 * 300

# The host's names of a conditioning and its parts.
EMBED = "embed"
CODES, FRAMES, VECTOR = _NAMES = ("speech_token", "speech_feat", "embedding")
NUM_MELS, VECTOR_SIZE = 80, 192
_TALKER_KEYS = frozenset({FIELD, MODE, prompts.TEXT_IDS})


class _HostsModel(CosyVoice3Model):
    """The host's model with the arguments that other talkers' logits take."""

    def compute_logits(self, hidden_states: Any, sampling_metadata: Any = None) -> Any:
        del sampling_metadata
        logits: Any = super().compute_logits(hidden_states)
        # Standard sampling of 0.32 has it among the ids that stop a speech.
        logits[:, FAMILY.failure_id] = float("-inf")
        return logits

    def _cosyvoice3_ras_enabled(self, sampling_metadata: Any) -> bool:
        del sampling_metadata  # one request's change how the others' ids are drawn
        return self.model_stage == TALKER


class CachedCosyVoice3Model(talker.SamplingTalker, _HostsModel):
    """The host's model in either stage, with voices from stored encodings."""

    tts_cache_family = FAMILY

    # Prompts hold no audio, so the host's processor, which encodes it in the API
    # process and downloads a network for that, is never made.
    supports_multimodal = False
    supports_multimodal_raw_input_only = False

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        is_talker = vllm_config.model_config.model_stage == TALKER
        if is_talker:
            talker.refuse_prefix_caching(vllm_config, FAMILY)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config
        self._sends_once = config.async_chunk and stage_sends_async_output(config)
        # The runner then has `preprocess` make the rows of each request.
        self.has_preprocess = is_talker

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the stage; the talker's worker loads the reference encoders, too."""
        if self.has_preprocess:
            return super().load_weights(weights)
        loaded = _HostsModel.load_weights(self, weights)
        fix_noise(self.code2wav.flow_model.decoder)
        # The host does this in its first step, which then waits for a download.
        self._maybe_enable_code2wav_trt()
        return loaded

    @talker.failing_alone
    def preprocess(self, input_ids: Tensor, input_embeds: Any, **info: Any) -> Built:
        """Build a span's rows: those of the prompt, or of codes that were spoken."""
        del input_embeds
        begin = int(info.get("_omni_num_computed_tokens", 0))
        length = int(info.get("_omni_prompt_len", begin + len(input_ids)))
        if begin >= length:  # a decode step, or codes spoken before a preemption
            return input_ids, self._code_rows(input_ids), {}
        conditioning = info.get(EMBED) or self._conditioning(info)
        codes = conditioning[CODES][0]
        prompt = self._prompt_rows(info, codes, length, input_ids.device)
        if not info.get(EMBED):  # else a later chunk, or after a preemption
            self._count_prompt()
        rows = prompt[begin : begin + len(input_ids)]
        if len(rows) < len(input_ids):
            rows = torch.cat([rows, self._code_rows(input_ids[len(rows) :])])
        return input_ids, rows, {EMBED: conditioning}

    def preprocess_decode_batch(
        self, *, input_ids: Tensor, req_infos: Sequence[Mapping[str, Any]]
    ) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        """Build the rows of requests that all decode: one look-up, as stock has."""
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
        """Compute as the host; the talker returns its hidden states alone.

        `make_omni_output`, which the runner calls in each step, adds the decoder's
        conditionings: a CUDA graph may replay this method without running its Python.
        """
        if not self.has_preprocess and BUFFER in kwargs:
            # Without the talker's keys: the decoder refuses unknown ones.
            kwargs[BUFFER] = [
                {name: info[name] for name in info if name not in _TALKER_KEYS}
                for info in kwargs[BUFFER]
            ]
        given = input_ids, positions, intermediate_tensors, inputs_embeds
        output = super().forward(*given, additional_information, **kwargs)
        if not self.has_preprocess:
            return output
        # vLLM-Omni 0.32 returns the talker's hidden states alone as well.
        return getattr(output, "text_hidden_states", output)

    def make_omni_output(self, model_outputs: Any, **kwargs: Any) -> OmniOutput:
        """Add the decoder's conditionings to a step's hidden states."""
        if isinstance(model_outputs, OmniOutput):
            return model_outputs
        infos = kwargs.get(BUFFER) or ()
        outputs: Any = handed_on(infos, once=self._sends_once)
        return OmniOutput(text_hidden_states=model_outputs, multimodal_outputs=outputs)

    def _conditioning(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a request's conditioning, on the CPU and under the host's names.

        Raises: TTSCacheError, ValueError: an encoding is missing or does not fit.
        """
        encoders = mode_of_request(FAMILY, info).encoders
        found = self._encodings(self._speaker(info), encoders)
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
        """Return ``(announced, hidden)``: start, texts, turn, and codes if zero-shot.

        Raises: TTSCacheError if it would have another length.
        """
        mode = mode_of_request(FAMILY, info)
        texts: Any = self.talker.llm.model
        ids = prompts.ids_of_request(info, texts.vocab_size)
        made = prompts.count_positions(mode, num_ids=len(ids), num_tokens=len(codes))
        check_length(made, announced)
        spoken = codes.tolist() if prompts.has_codes(mode) else []
        marked = np.array([self.talker.sos, self.talker.task_id, *spoken])
        rows = self._code_rows(talker.on_device(marked, device, torch.long))
        text_ids = talker.on_device(np.array(ids), device, torch.long)
        return torch.cat([rows[:1], texts.embed_tokens(text_ids), rows[1:]])

    def _code_rows(self, ids: Tensor) -> Tensor:
        return self.talker.speech_embedding.weight[ids.to(torch.long)]

    def _passed_over(self, input_ids: Tensor, info: Mapping[str, Any]) -> Built:
        """Return zero rows for a failed request; its first sampled id ends it."""
        del info
        table = self.talker.speech_embedding.weight
        zeros = table.new_zeros((len(input_ids), table.shape[1]))
        return input_ids, zeros, {}


class FixedNoiseCFM(cfm.CausalConditionalCFM):
    """The host's flow matching, from the same noise every time, as the official code.

    The host draws new noise for every chunk of every request. So equal requests sound
    different, other requests change the sound, and a chunk does not start from the
    noise that the chunk before it ended with.

    Attributes:
        noise: ``(1, 80, MAX_FRAMES)`` float32; a frame's noise depends on its place
            alone, so chunks of a stream agree where they overlap.
    """

    noise: Tensor

    @torch.inference_mode()
    def forward(
        self,
        mu: Tensor,
        mask: Tensor,
        n_timesteps: int,
        temperature: float = 1.0,
        spks: Tensor | None = None,
        cond: Tensor | None = None,
        streaming: bool = False,  # noqa: ARG002  the host's signature
    ) -> tuple[Tensor, None]:
        """Solve from the noise to the mel.

        Source: ``CausalConditionalCFM.forward`` of the official code.
        """
        noise = self.noise[:, :, : mu.size(2)].to(mu) * temperature
        span = torch.linspace(0, 1, n_timesteps + 1, device=mu.device, dtype=mu.dtype)
        if self.t_scheduler == "cosine":
            span = 1 - torch.cos(span * 0.5 * torch.pi)
        start = noise.expand(mu.size(0), -1, -1)
        return self.solve_euler(start, span, mu, mask, spks, cond), None


def fix_noise(decoder: Any) -> None:
    """Make a built decoder start from the official noise."""
    decoder.__class__ = FixedNoiseCFM
    generator = torch.Generator().manual_seed(0)
    size, where = (1, NUM_MELS, MAX_FRAMES), next(decoder.parameters()).device
    noise = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
    decoder.noise = noise.to(where)


def conditioning_of(
    codes: Array, mel: Array, vector: Array, *, num_codes: int
) -> dict[str, Tensor]:
    """Return a voice's conditioning on the CPU, under the host's names.

    The mel has about two frames for each token; tokens without both are cut off.

    Raises: TTSCacheError if an encoding does not fit the decoder.
    """
    shapes = codes.ndim, mel.shape[1:], vector.shape
    if shapes != (1, (NUM_MELS,), (VECTOR_SIZE,)):
        raise TTSCacheError(
            f"its encodings are {codes.shape}, {mel.shape} and {vector.shape}, and "
            f"the decoder takes mels of {NUM_MELS} and vectors of {VECTOR_SIZE}"
        )
    if codes.min() < 0 or codes.max() >= num_codes:
        # On a GPU an index out of range would end the process.
        raise TTSCacheError("one of its speech tokens is no code of the model")
    num_tokens = counts.used_tokens(len(codes), len(mel))
    return {
        CODES: torch.tensor(codes[:num_tokens], dtype=torch.int32)[None],
        FRAMES: torch.tensor(mel[: counts.MEL_FRAMES_PER_TOKEN * num_tokens])[None],
        VECTOR: torch.tensor(vector)[None],
    }


def handed_on(infos: Sequence[Mapping[str, Any]], *, once: bool) -> dict[str, Any]:
    """Return the conditionings of a step's requests, in the batch's order.

    The runner gives a request the entry at its place, so every request has one. In a
    step in which no request begins, the result is empty.

    Args:
        infos: The runner's info of each request.
        once: Whether the sender uses only the first entry of a request, as it does for
            speech in chunks: then the entry of a running request is empty. Else it uses
            the last entry, so that of a running request is sent again.
    """
    begins = [info.get("_omni_is_prefill", True) for info in infos]
    if not any(begins):
        return {}
    conditionings = [
        (info.get(EMBED) if is_new or not once else None) or _empty_conditioning()
        for info, is_new in zip(infos, begins, strict=True)
    ]
    return {EMBED: {name: [each[name] for each in conditionings] for name in _NAMES}}


def _empty_conditioning() -> dict[str, Tensor]:
    """Return the empty conditioning of a request that failed, or has got its own."""
    return {
        CODES: torch.zeros((1, 0), dtype=torch.int32),
        FRAMES: torch.zeros((1, 0, NUM_MELS), dtype=torch.float32),
        VECTOR: torch.zeros((1, VECTOR_SIZE), dtype=torch.float32),
    }
