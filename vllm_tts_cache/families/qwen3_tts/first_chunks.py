"""The first frames of requests that begin behind a state of their voice.

The host decodes such frames behind an empty state, an x-vector's, many requests at a
time. It has no batch for frames behind a state that has no frames yet.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as host,
)

from vllm_tts_cache.families.qwen3_tts.streamed_convs import StreamedConvs

# As the host calls what its decoder remembers of a request, and a name of ours, which
# is there until the first frames are decoded.
State = dict[str, Any]
TAILS = "tts_cache_tails"


class FirstChunks:
    """Has a decoder begin requests whose states hold `TAILS`; all else is the host's.

    Args:
        decoder: The host's codec decoder.
        convs: Its convolutions.
    """

    def __init__(self, decoder: Any, convs: StreamedConvs):
        self._decoder = decoder
        self._convs = convs
        later = decoder.batched_chunked_decode
        decoder.batched_chunked_decode = partial(self._decode, later)

    def _decode(
        self,
        later: Any,
        codes: Tensor,
        lengths: Sequence[int],
        caches: Sequence[State] | None = None,
        max_batch_size: int = 0,
        **settings: Any,
    ) -> list[Tensor]:
        """As the host's ``batched_chunked_decode``; ``(1, num_samples)`` of each."""
        settings["max_batch_size"] = max_batch_size
        states = caches or []
        found: dict[int, Tensor] = {}
        for rows in _alike(lengths, states, max_batch_size or len(lengths)):
            frames = codes[rows, :, : lengths[rows[0]]]
            samples = self._together(frames, [states[row] for row in rows])
            found.update(zip(rows, samples, strict=True))
        if not found:
            return later(codes, lengths, caches=caches, **settings)
        if rest := [row for row in range(len(lengths)) if row not in found]:
            given = [lengths[row] for row in rest], [states[row] for row in rest]
            samples = later(codes[rest], given[0], caches=given[1], **settings)
            found.update(zip(rest, samples, strict=True))
        return [found[row] for row in range(len(lengths))]

    def _together(self, codes: Tensor, states: list[State]) -> Tensor:
        """Decode ``(num_rows, num_codebooks, num_frames)`` behind states of one length.

        Returns ``(num_rows, 1, num_samples)``.
        """
        decoder, num_frames = self._decoder, codes.shape[-1]
        tails = [
            torch.cat(row) for row in zip(*(s.pop(TAILS) for s in states), strict=True)
        ]
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
            # A copy: requests share a voice's.
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
        """Leave in each state what the host leaves there."""
        window = int(self._decoder.config.sliding_window)
        # The host keeps all of it while its window is not full.
        is_full = quantized.shape[-1] >= window
        num_convolved = window - host._CONV_CONTEXT_FRAME if is_full else 0
        for number, state in enumerate(states):
            row = slice(number, number + 1)
            state["suffix_quantized"] = quantized[row, :, -window:].clone()
            state["suffix_conv"] = convolved[row, -num_convolved:].clone()
            state["suffix_frames"] = quantized.shape[-1]


def _alike(
    lengths: Sequence[int], states: Sequence[State], max_rows: int
) -> Iterator[list[int]]:
    """Rows that begin with as many frames behind as many, so many at most at a time."""
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
    """``(num_rows, length)``, of which each row begins with frames that are none."""
    mask = torch.ones((len(paddings), length), dtype=torch.bool, device=device)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = False
    return mask


def samples_of(decoder: Any, hidden: Tensor) -> Tensor:
    """``(num_rows, num_frames, hidden)`` to ``(num_rows, 1, num_samples)``.

    As the host does.
    """
    columns = hidden.permute(0, 2, 1)
    for blocks in decoder.upsample:
        for block in blocks:
            columns = block(columns)
    for block in decoder.decoder:
        columns = block(columns)
    return columns.clamp(min=-1, max=1)
