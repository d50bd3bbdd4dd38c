"""The codec decoder's state after the reference of a clone in context.

Later frames depend on the reference's last frames (72, as shipped) by the keys and
values of a transformer, and by what the convolutions behind it read last. Both are the
same for every request of a voice. The host computes them anew in each request, with 72
frames of samples that nobody hears.
"""

import copy
import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as host,
)

from vllm_tts_cache.families.qwen3_tts.streamed_convs import StreamedConvs
from vllm_tts_cache.model_executor.decoder_states import DecoderState, DecoderStates

# As the host calls what its decoder remembers of a request, and a name of ours.
State = dict[str, Any]
_TAILS = "tts_cache_tails"


class DecoderPrefixes:
    """Begins requests behind a reference.

    Args:
        decoder: The host's codec decoder, with its weights.
        states: Keeps those of registered voices.
    """

    def __init__(self, decoder: Any, states: DecoderStates):
        self._decoder = decoder
        self._states = states
        self._convs = StreamedConvs(decoder)
        decoder.decode_suffix = partial(self._decode, decoder.decode_suffix)

    def begin(self, codes: Tensor, audio_sha256: str | None) -> State:
        """A request's state behind a reference.

        Args:
            codes: ``(num_codebooks, num_frames)`` of the reference, integers.
            audio_sha256: Of a registered voice, whose state is kept.
        """
        make = partial(self._make, codes)
        return dict(self._states.get(audio_sha256, _digest(codes), make))

    def _decode(self, later: Any, codes: Tensor, state: State, length: int) -> Tensor:
        """Decode frames; the host's own function does all but the first ones."""
        if (tails := state.pop(_TAILS, None)) is None:
            return later(codes, state, length)
        decoder, num_frames = self._decoder, codes.shape[-1]
        quantized = decoder.quantizer.decode(codes)
        context = state["ref_hidden"][:, :, -host._CONV_CONTEXT_FRAME :]
        convolved = decoder.pre_conv(torch.cat([context, quantized], dim=-1))
        convolved = convolved[:, :, -num_frames:].transpose(1, 2)
        mask = _mask(length + num_frames, state["prefix_pad_frames"], codes.device)
        hidden = decoder.pre_transformer(
            inputs_embeds=convolved,
            attention_mask=mask,
            past_key_values=copy.deepcopy(state["past_key_values"]),
            use_cache=True,
        ).last_hidden_state
        with self._convs.behind(tails):
            samples = self._samples(hidden)
        window = int(decoder.config.sliding_window)
        state["suffix_quantized"] = quantized[:, :, -window:]
        state["suffix_conv"] = convolved[:, -(window - host._CONV_CONTEXT_FRAME) :]
        state["suffix_frames"] = num_frames
        return samples

    @torch.no_grad()
    def _make(self, codes: Tensor) -> DecoderState:
        """Compute it alone, so that its bits depend on no neighbour.

        A shorter reference is padded as the host pads it, which then decodes requests
        of all lengths together.
        """
        decoder, num_frames = self._decoder, codes.shape[-1]
        length = max(int(decoder.config.sliding_window), num_frames)
        padding = length - num_frames
        mask = _mask(length, padding, codes.device)
        padded = functional.pad(codes.to(torch.long).unsqueeze(0), (padding, 0))
        quantized = decoder.quantizer.decode(padded)
        quantized = quantized * mask.unsqueeze(1).to(quantized.dtype)
        convolved = decoder.pre_conv(quantized).transpose(1, 2)
        after = decoder.pre_transformer(
            inputs_embeds=convolved, attention_mask=mask, use_cache=True
        )
        hidden = after.last_hidden_state * mask.unsqueeze(-1)
        with self._convs.recorded() as tails:
            # As many as the host gives them with every later chunk.
            self._samples(hidden[:, -host._DOWNSTREAM_CONTEXT_FRAME :])
        state = {
            "prefix_frames": num_frames,
            "decoder_prefix_frames": length,
            "prefix_pad_frames": padding,
            "ref_hidden": quantized,
            "ref_conv": convolved,
            "prefix_hidden": hidden,
            "past_key_values": after.past_key_values,
            # Nothing is behind it yet.
            "suffix_quantized": quantized[:, :, :0],
            "suffix_conv": convolved[:, :0],
            "suffix_frames": 0,
            _TAILS: tails,
        }
        return DecoderState(state, _num_bytes(state))

    def _samples(self, hidden: Tensor) -> Tensor:
        """``(1, num_frames, hidden)`` to ``(1, 1, num_samples)``, as the host does."""
        columns = hidden.permute(0, 2, 1)
        for blocks in self._decoder.upsample:
            for block in blocks:
                columns = block(columns)
        for block in self._decoder.decoder:
            columns = block(columns)
        return columns.clamp(min=-1, max=1)


def _mask(length: int, padding: int, device: torch.device) -> Tensor:
    mask = torch.ones((1, length), dtype=torch.bool, device=device)
    mask[:, :padding] = False
    return mask


def _digest(codes: Tensor) -> str:
    values = codes.to(device="cpu", dtype=torch.int32).contiguous()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def _num_bytes(state: State) -> int:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    for layer in state["past_key_values"].layers:
        tensors += [layer.keys, layer.values]
    tensors += state[_TAILS]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
