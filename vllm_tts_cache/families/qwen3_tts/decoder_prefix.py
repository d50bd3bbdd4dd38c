"""The codec decoder's state after the reference of a clone in context, and its use.

Later frames depend on the reference's last frames (72, as shipped) by the keys and
values of a transformer, and by the columns that the causal convolutions after it read
last. Both are the same for every request of a voice. The host computes them again in
each request, with 72 frames of samples that it throws away, and with 12 frames in each
later chunk.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as host,
)

from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor.decoder_states import DecoderState, DecoderStates

throttled = ThrottledLog()

# The host's decoder state of a request. Until its first frames are decoded, it also has
# the key `TAILS`.
State = dict[str, Any]
TAILS = "tts_cache_tails"
# The columns that each convolution reads again, in the order of their calls.
Tails = list[Tensor]
_Conv = Callable[[Tensor], Tensor]


class DecoderPrefixes:
    """Makes the decoder states with which requests begin after a reference.

    It patches the host's codec decoder to begin requests whose states hold `TAILS`: the
    host decodes first frames in batches only after an empty state, an x-vector's.
    ``states`` caches the states of registered voices.
    """

    def __init__(self, decoder: Any, states: DecoderStates):
        self._decoder = decoder
        self._states = states
        self._convs = StreamedConvs(decoder)
        later = decoder.batched_chunked_decode
        decoder.batched_chunked_decode = partial(self._decode, later)

    def begin(self, codes: Tensor, audio_sha256: str | None) -> State | None:
        """Return a request's state after a reference.

        ``codes`` of the reference are ``(num_codebooks, num_frames)`` integers, on any
        device. With the address of a registered voice the state is cached.

        Returns None, and deletes all cached states, if the device has no memory for a
        state: the host's own first chunk needs none.
        """
        make = partial(self._make, codes)
        values = codes.to(device="cpu", dtype=torch.int32).contiguous()
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        try:
            return dict(self._states.get(audio_sha256, digest, make))
        except torch.OutOfMemoryError as exc:
            num_deleted = self._states.delete_all_for_now()
            message = "No memory for a voice's state in the decoder; deleted %d: %s"
            throttled.warn_of("making a decoder's state", message, num_deleted, exc)
            return None

    @torch.no_grad()
    def _make(self, codes: Tensor) -> DecoderState:
        """Compute one state by itself, so that its bits depend on no other request.

        A reference that is shorter than the window is padded as by the host, which can
        then decode requests of all lengths together.
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
        transform = decoder.pre_transformer
        after = transform(inputs_embeds=convolved, attention_mask=mask, use_cache=True)
        hidden = after.last_hidden_state * mask.unsqueeze(-1)
        with self._convs.behind() as tails:
            # As many frames as the host adds to every later chunk.
            samples_of(decoder, hidden[:, -host._DOWNSTREAM_CONTEXT_FRAME :])
        state = {
            "prefix_frames": num_frames,
            "decoder_prefix_frames": length,
            "prefix_pad_frames": padding,
            "ref_hidden": quantized,
            "ref_conv": convolved,
            "prefix_hidden": hidden,
            "past_key_values": _copied(after.past_key_values),
            TAILS: tails,
        }
        return DecoderState(state, _num_bytes(state))

    def _decode(
        self,
        later: Any,
        codes: Tensor,
        lengths: Sequence[int],
        caches: Sequence[State] | None = None,
        max_batch_size: int = 0,
        **settings: Any,
    ) -> list[Tensor]:
        """As the host's ``batched_chunked_decode``: ``(1, num_samples)`` for each."""
        settings["max_batch_size"] = max_batch_size
        states = caches or []
        found: dict[int, Tensor] = {}
        for rows in _rows_of_one_shape(lengths, states, max_batch_size or len(lengths)):
            frames = codes[rows, :, : lengths[rows[0]]]
            samples = self._decode_together(frames, [states[row] for row in rows])
            found.update(zip(rows, samples, strict=True))
        if not found:
            return later(codes, lengths, caches=caches, **settings)
        if rest := [row for row in range(len(lengths)) if row not in found]:
            given = [lengths[row] for row in rest], [states[row] for row in rest]
            samples = later(codes[rest], given[0], caches=given[1], **settings)
            found.update(zip(rest, samples, strict=True))
        return [found[row] for row in range(len(lengths))]

    def _decode_together(self, codes: Tensor, states: list[State]) -> Tensor:
        """Decode ``(num_rows, num_codebooks, num_frames)`` after states of one length.

        Returns ``(num_rows, 1, num_samples)``.
        """
        decoder, num_frames = self._decoder, codes.shape[-1]
        ends = (state.pop(TAILS) for state in states)
        tails = [torch.cat(row) for row in zip(*ends, strict=True)]
        quantized = decoder.quantizer.decode(codes)
        context = torch.cat([state["ref_hidden"] for state in states])
        context = context[:, :, -host._CONV_CONTEXT_FRAME :]
        convolved = decoder.pre_conv(torch.cat([context, quantized], dim=-1))
        convolved = convolved[:, :, -num_frames:].transpose(1, 2)
        length = states[0]["decoder_prefix_frames"] + num_frames
        paddings = [state["prefix_pad_frames"] for state in states]
        hidden = decoder.pre_transformer(
            inputs_embeds=convolved,
            attention_mask=attention_mask(length, paddings, codes.device),
            # A copy: requests of a voice share these keys and values.
            past_key_values=decoder._batch_dynamic_caches(
                [state["past_key_values"] for state in states]
            ),
            use_cache=True,
        ).last_hidden_state
        with self._convs.behind(tails):
            samples = samples_of(decoder, hidden)
        self._remember(states, quantized, convolved)
        return samples

    def _remember(
        self, states: list[State], quantized: Tensor, convolved: Tensor
    ) -> None:
        """Store in each state what the host stores there."""
        window = int(self._decoder.config.sliding_window)
        # The host keeps all frames while its window is not full.
        is_full = quantized.shape[-1] >= window
        num_convolved = window - host._CONV_CONTEXT_FRAME if is_full else 0
        for number, state in enumerate(states):
            row = slice(number, number + 1)
            state["suffix_quantized"] = quantized[row, :, -window:].clone()
            state["suffix_conv"] = convolved[row, -num_convolved:].clone()
            state["suffix_frames"] = quantized.shape[-1]


def _copied(cache: Any) -> Any:
    """Copy the cache's keys and values, which are views of larger tensors."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return cache


def _num_bytes(state: State) -> int:
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    for layer in state["past_key_values"].layers:
        tensors += [layer.keys, layer.values]
    tensors += state[TAILS]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _rows_of_one_shape(
    lengths: Sequence[int], states: Sequence[State], max_rows: int
) -> Iterator[list[int]]:
    """Yield rows of equal frames and equal prefix frames, ``max_rows`` at most."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, state in enumerate(states):
        if TAILS in state:
            shape = (lengths[row], state["decoder_prefix_frames"])
            groups.setdefault(shape, []).append(row)
    for rows in groups.values():
        for first in range(0, len(rows), max_rows):
            yield rows[first : first + max_rows]


def attention_mask(
    length: int, paddings: Sequence[int], device: torch.device
) -> Tensor:
    """Return ``(num_rows, length)``, False where a row begins with padding."""
    mask = torch.ones((len(paddings), length), dtype=torch.bool, device=device)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = False
    return mask


def samples_of(decoder: Any, hidden: Tensor) -> Tensor:
    """Decode ``(num_rows, num_frames, hidden)`` to ``(num_rows, 1, num_samples)``."""
    columns = hidden.permute(0, 2, 1)
    for blocks in decoder.upsample:
        for block in blocks:
            columns = block(columns)
    for block in decoder.decoder:
        columns = block(columns)
    return columns.clamp(min=-1, max=1)


class StreamedConvs:
    """Lets a codec decoder's convolutions begin after columns that they read before.

    Outside of the blocks of `behind` they compute as the host does.
    """

    def __init__(self, decoder: Any):
        self._tails: Tails | None = None
        self._num_read = 0
        self._is_recording = False
        for module in (*decoder.upsample.modules(), *decoder.decoder.modules()):
            if (streamed := self._streamed(module)) is not None:
                module.forward = partial(streamed, module, module.forward)

    def _streamed(self, module: Any) -> Callable[[Any, _Conv, Tensor], Tensor] | None:
        """Return how a convolution reads earlier columns; None for other modules."""
        if isinstance(module, host.Qwen3TTSTokenizerV2CausalConvNet):
            return self._conv if module.padding else None
        if isinstance(module, host.Qwen3TTSTokenizerV2CausalTransConvNet):
            return self._spread if module.right_pad else None
        return None

    @contextmanager
    def behind(self, tails: Tails | None = None) -> Iterator[Tails]:
        """Let the convolutions begin after ``tails``; each must run once.

        Without tails they begin after silence, as the host's, and each adds the columns
        that it read last to the list that is yielded.
        """
        self._is_recording = tails is None
        self._tails, self._num_read = tails or [], 0
        try:
            yield self._tails
        finally:
            self._tails = None

    def _conv(self, module: Any, forward: _Conv, columns: Tensor) -> Tensor:
        if self._tails is None:
            return forward(columns)
        if self._is_recording:
            self._record(columns, module.padding)
            return forward(columns)
        return module.conv(self._joined(columns)).contiguous()

    def _spread(self, module: Any, forward: _Conv, columns: Tensor) -> Tensor:
        """Compute a transposed convolution, whose columns overlap the next ones."""
        if self._tails is None:
            return forward(columns)
        (stride,), (width,) = module.conv.stride, module.conv.kernel_size
        num_read = -(-width // stride) - 1
        if self._is_recording:
            self._record(columns, num_read)
            return forward(columns)
        spread = module.conv(self._joined(columns))
        return spread[..., num_read * stride : -module.right_pad].contiguous()

    def _record(self, columns: Tensor, num_read: int) -> None:
        assert self._tails is not None
        padded = functional.pad(columns, (max(0, num_read - columns.shape[-1]), 0))
        self._tails.append(padded[..., -num_read:].clone())

    def _joined(self, columns: Tensor) -> Tensor:
        assert self._tails is not None
        tail = self._tails[self._num_read]
        self._num_read += 1
        return torch.cat([tail, columns], dim=-1)
