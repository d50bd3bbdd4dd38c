"""The codec decoder's state after the reference of a clone in context.

Later frames depend on the reference's last frames (72, as shipped) by the keys and
values of a transformer, and by what the convolutions behind it read last. Both are the
same for every request of a voice. The host computes them anew in each request, with 72
frames of samples that nobody hears.
"""

import hashlib
import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as host,
)

from vllm_tts_cache.families.qwen3_tts.first_chunks import (
    TAILS,
    FirstChunks,
    State,
    attention_mask,
    samples_of,
)
from vllm_tts_cache.families.qwen3_tts.streamed_convs import StreamedConvs
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor.decoder_states import DecoderState, DecoderStates

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))


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
        FirstChunks(decoder, self._convs)

    def begin(self, codes: Tensor, audio_sha256: str | None) -> State | None:
        """A request's state behind a reference.

        Args:
            codes: ``(num_codebooks, num_frames)`` of the reference, integers, on any
                device.
            audio_sha256: Of a registered voice, whose state is kept.

        Returns None, and deletes all that is kept, where the device has no memory for
        one: the host's own first chunk needs no state.
        """
        make = partial(self._make, codes)
        try:
            return dict(self._states.get(audio_sha256, _digest(codes), make))
        except torch.OutOfMemoryError as exc:
            num_deleted = self._states.delete_all_for_now()
            message = "No memory for a voice's state in the decoder; deleted %d: %s"
            throttled.warn_of("making a decoder's state", message, num_deleted, exc)
            return None

    @torch.no_grad()
    def _make(self, codes: Tensor) -> DecoderState:
        """Compute it alone, so that its bits depend on no neighbour.

        A shorter reference is padded as the host pads it, which then decodes requests
        of all lengths together.
        """
        decoder, num_frames = self._decoder, codes.shape[-1]
        length = max(int(decoder.config.sliding_window), num_frames)
        padding = length - num_frames
        device = decoder.device  # the codes may come in main memory
        mask = attention_mask(length, [padding], device)
        frames = codes.to(device=device, dtype=torch.long).unsqueeze(0)
        padded = functional.pad(frames, (padding, 0))
        quantized = decoder.quantizer.decode(padded)
        quantized = quantized * mask.unsqueeze(1).to(quantized.dtype)
        convolved = decoder.pre_conv(quantized).transpose(1, 2)
        after = decoder.pre_transformer(
            inputs_embeds=convolved, attention_mask=mask, use_cache=True
        )
        hidden = after.last_hidden_state * mask.unsqueeze(-1)
        with self._convs.recorded() as tails:
            # As many as the host gives them with every later chunk.
            samples_of(decoder, hidden[:, -host._DOWNSTREAM_CONTEXT_FRAME :])
        state = {
            "prefix_frames": num_frames,
            "decoder_prefix_frames": length,
            "prefix_pad_frames": padding,
            "ref_hidden": quantized,
            "ref_conv": convolved,
            "prefix_hidden": hidden,
            "past_key_values": _alone(after.past_key_values),
            TAILS: tails,
        }
        return DecoderState(state, _num_bytes(state))


def _alone(cache: Any) -> Any:
    """The cache, holding on to no frames but its own, which are a view of more."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return cache


def _digest(codes: Tensor) -> str:
    values = codes.to(device="cpu", dtype=torch.int32).contiguous()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def _num_bytes(state: State) -> int:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    for layer in state["past_key_values"].layers:
        tensors += [layer.keys, layer.values]
    tensors += state[TAILS]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
