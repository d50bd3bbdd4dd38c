"""Qwen3-TTS's second stage, in which no request decodes its voice's reference."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from vllm_omni.model_executor.models.output_templates import OmniOutput
from vllm_omni.model_executor.models.qwen3_tts import qwen3_tts_code2wav as host

from vllm_tts_cache.config import load_settings
from vllm_tts_cache.families.qwen3_tts.decoder_prefix import DecoderPrefixes
from vllm_tts_cache.families.qwen3_tts.family import HANDED_ON
from vllm_tts_cache.model_executor.decoder_states import DecoderStates
from vllm_tts_cache.store.encoding import ADDRESS

Info = dict[str, Any]


class CachedQwen3TTSCode2Wav(host.Qwen3TTSCode2Wav):
    """The host's decoder; this plugin only changes how a clone in context begins."""

    tts_cache_decoder_states: DecoderStates | None = None
    _prefixes: DecoderPrefixes | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the decoder, and delete states that other weights computed.

        With CUDA graphs no states are kept: the host replays its own first chunk.
        """
        loaded = super().load_weights(weights)
        max_bytes = load_settings().decoder_max_bytes
        if self.tts_cache_decoder_states is not None:
            self.tts_cache_decoder_states.delete_all_for_now()
        elif max_bytes and self._async_chunk and not self.decoder._cudagraph_enabled:
            self.tts_cache_decoder_states = DecoderStates(max_bytes)
            states = self.tts_cache_decoder_states
            self._prefixes = DecoderPrefixes(self.decoder, states)
        return loaded

    def forward(
        self,
        input_ids: Tensor | None = None,
        positions: Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        runtime_additional_information: list[Info] | None = None,
        model_intermediate_buffer: list[Info] | None = None,
        **kwargs: Any,
    ) -> OmniOutput:
        """Decode as the host does, but a clone's first chunk without the reference."""
        infos = runtime_additional_information or model_intermediate_buffer or []
        if self._prefixes is not None and input_ids is not None and input_ids.numel():
            counts, ids = (
                kwargs.get("seq_token_counts"),
                kwargs.get("request_ids") or (),
            )
            spans = self._split_request_ids(input_ids.reshape(-1), counts)
            begun = [
                self._begun(self._prefixes, _state_id(ids, number, info), info, span)
                for number, (info, span) in enumerate(zip(infos, spans, strict=False))
            ]
            # A dummy run has more infos than spans.
            infos = [*begun, *infos[len(begun) :]]
        kwargs["runtime_additional_information"] = infos
        given = input_ids, positions, intermediate_tensors, inputs_embeds
        return super().forward(*given, **kwargs)

    def _begun(
        self, prefixes: DecoderPrefixes, request_id: str | None, info: Any, span: Tensor
    ) -> Any:
        """Return a request's info; leave a reference out whose state is stored or made.

        The host decodes the codes in the info, or else the ids. So the codes that
        follow the reference are put into the info.
        """
        if request_id is None or request_id in self._decoder_state_cache:
            return info
        meta = info.get("meta") or {}
        num_reference = _integer(meta.get("ref_context_size"))
        if not (num_reference and _integer(meta.get("ref_context_included"))):
            return info
        codes = host._codec_ids_from_payload_or_input(span, info)
        if codes.numel() % self._num_quantizers:
            return info  # the host logs it
        frames = codes.reshape(self._num_quantizers, -1)
        if frames.shape[1] <= num_reference:
            return info
        state = prefixes.begin(frames[:, :num_reference], _registered(info))
        if state is None:
            return info
        self._decoder_state_cache[request_id] = state
        spoken = frames[:, num_reference:].reshape(-1)
        return {**info, "codes": {"audio": spoken}}


def _state_id(given: Sequence[Any], number: int, info: Any) -> str | None:
    """Return the request's id for the host's states; None for a dummy request.

    Only the info has the id in the host's dummy runs and its second runner's steps.
    """
    if not isinstance(info, dict):
        return None
    name = _single_value((info.get("meta") or {}).get("request_id"))
    if number < len(given):
        name = given[number]
    if name is None or str(name).startswith(host._DUMMY_REQUEST_ID):
        return None
    return str(name)


def _integer(value: Any) -> int:
    return int(_single_value(value) or 0)


def _registered(info: Info) -> str | None:
    """Return the content address of a registered voice; None for other audio."""
    address = _single_value(info.get(HANDED_ON))
    return address if isinstance(address, str) and ADDRESS.fullmatch(address) else None


def _single_value(value: Any) -> Any:
    """Return the one value that the host puts into a list or a tensor."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, Tensor):
        value = value.reshape(-1)[0].item() if value.numel() else None
    return value
