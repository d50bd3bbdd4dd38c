"""What CosyVoice3's second stage computes of a reference, and what of it could stay.

    python -m benchmarks.flow_reference [--rounds 2] [--layers 22] [--bfloat16]
        [--small]

In this process, with the host's flow and vocoder of the released size and random
weights, one thread; writes a JSON file. An utterance is cut into the chunks that the
host's talker sends, each of which has the flow compute all that was spoken so far and
the reference. Times are CPU time. Of the flow's ten steps, which are alike, one is
timed and counted ten times; with ``--layers``, so many of the 22, counted for all. With
``--small`` networks that say nothing about times.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import alone
from benchmarks.measure import Row, Summary
from vllm_tts_cache.families.cosyvoice3.noise import fix_noise

TOKENS_PER_SECOND, NUM_MELS, SPEAKER_SIZE, NUM_CODES = 25, 80, 192, 6_561
CHUNK_TOKENS = 15  # as the host's deploy file has it
NUM_STEPS = 10
SPOKEN_SECONDS, REFERENCE_SECONDS = (3, 10), (0, 3, 10, 25)
_COMPARED_STEPS = 2
_SCENARIO: dict[str, Any] = {"scenario": "flow_reference", "model": "cosyvoice3"}


class Voice(NamedTuple):
    """What the decoder is told of a reference."""

    codes: Tensor
    mel: Tensor
    vector: Tensor


class Chunk(NamedTuple):
    """What it is told of an utterance in one step.

    Attributes:
        num_tokens: Spoken until then.
        num_before: Of these, whose samples were made before.
        is_last: Whether the utterance ends with it.
    """

    num_tokens: int
    num_before: int
    is_last: bool


def chunks_of(num_tokens: int, num_reference: int) -> Iterator[Chunk]:
    """An utterance's chunks, as the host cuts it while it is spoken."""
    from vllm_omni.model_executor.stage_input_processors.cosyvoice3 import (
        talker2code2wav_async_chunk,
    )

    extra = {"codec_chunk_frames": CHUNK_TOKENS}
    sender = SimpleNamespace(
        connector=SimpleNamespace(config={"extra": extra}), request_payload={}
    )
    told = {"embed": {"speech_token": torch.zeros((1, num_reference))}}
    for spoken in range(1, num_tokens + 1):
        is_last = spoken == num_tokens
        request = SimpleNamespace(
            external_req_id="one",
            output_token_ids=[1] * spoken,
            is_finished=lambda is_last=is_last: is_last,
        )
        payload = talker2code2wav_async_chunk(sender, told, request)
        if payload is not None:
            meta = payload.meta
            yield Chunk(len(payload.codes.audio), meta.left_context_size, is_last)


class Decoder:
    """The host's flow and vocoder, with random weights.

    Args:
        is_small: Not of the released size.
        num_layers: Of the flow that are computed; None for all.
        dtype: The flow's.
    """

    def __init__(self, *, is_small: bool, num_layers: int | None, dtype: torch.dtype):
        from vllm_omni.model_executor.models.cosyvoice3.cosyvoice3_code2wav import (
            CosyVoice3Code2Wav,
        )
        from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

        from vllm_tts_cache.families.cosyvoice3.tiny.configs import host_overrides

        config = CosyVoice3Config()
        if is_small:
            for name, value in host_overrides().items():
                setattr(config, name, value)
        torch.manual_seed(0)
        self._model = CosyVoice3Code2Wav(config).eval().requires_grad_(False)
        self._model.flow_model.to(dtype)
        fix_noise(self._model.flow_model.decoder)
        estimator = self._model.flow_model.decoder.estimator
        blocks = estimator.transformer_blocks
        estimator.transformer_blocks = blocks[:num_layers]
        # What is left out is as much again, but for the ends of the network.
        self._num_times = NUM_STEPS * len(blocks) / len(estimator.transformer_blocks)

    def speak(self, codes: Tensor, voice: Voice) -> tuple[float, float]:
        """CPU seconds of the flow and of the vocoder for an utterance in chunks."""
        flow, vocoder, state = 0.0, 0.0, None
        for chunk in chunks_of(codes.shape[1], voice.codes.shape[1]):
            began = time.process_time()
            mel = self._mel(codes[:, : chunk.num_tokens], voice, chunk, num_steps=1)
            made = time.process_time()
            _, state = self._model._stream_hift_from_feat(
                mel, cache_state=state, finalize=chunk.is_last
            )
            flow += self._num_times * (made - began)
            vocoder += time.process_time() - made
        return flow, vocoder

    def num_equal_keys(self, texts: Sequence[Tensor], voice: Voice) -> tuple[int, int]:
        """Of the reference's keys, those that are the same whatever is spoken.

        Returns how many pairs of a layer and a step have the same ones in all but the
        last frames, which look ahead into the text, and how many pairs there are.
        """
        seen = [self._keys(codes, voice) for codes in texts]
        pairs = list(zip(*seen, strict=True))
        return sum(torch.equal(one, other) for one, other in pairs), len(pairs)

    def _keys(self, codes: Tensor, voice: Voice) -> list[Tensor]:
        """Of each layer in each step: ``(2, num_frames, width)``."""
        flow = self._model.flow_model
        num_frames = voice.mel.shape[1] - 2 * flow.pre_lookahead_len
        kept: list[Tensor] = []

        def keep(_module: Any, _given: Any, keys: Tensor) -> None:
            kept.append(keys[:, :num_frames].clone())

        blocks = flow.decoder.estimator.transformer_blocks
        hooks = [block.attn.to_k.register_forward_hook(keep) for block in blocks]
        whole = Chunk(codes.shape[1], 0, is_last=True)
        self._mel(codes, voice, whole, num_steps=_COMPARED_STEPS)
        for hook in hooks:
            hook.remove()
        return kept

    def _mel(
        self, codes: Tensor, voice: Voice, chunk: Chunk, *, num_steps: int
    ) -> Tensor:
        return self._model._forward_mel(
            codes,
            voice.codes,
            voice.mel,
            voice.vector,
            n_timesteps=num_steps,
            token_offset_tokens=chunk.num_before,
            finalize=chunk.is_last,
        )


def voice_of(num_seconds: int) -> Voice:
    """A reference of so many seconds; of none it has no frames."""
    codes = codes_of(num_seconds, seed=num_seconds)
    generator = torch.Generator().manual_seed(num_seconds)
    mel = torch.randn((1, 2 * codes.shape[1], NUM_MELS), generator=generator)
    return Voice(codes, mel, torch.randn((1, SPEAKER_SIZE), generator=generator))


def codes_of(num_seconds: int, seed: int) -> Tensor:
    """``(1, num_tokens)``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, num_seconds * TOKENS_PER_SECOND)
    return torch.randint(0, NUM_CODES, shape, generator=generator)


def main(arguments: Sequence[str]) -> None:
    """Measure, print a table and write it."""
    parser = alone.parser(__doc__, num_rounds=2)
    parser.add_argument("--layers", type=int)
    given = parser.parse_args(arguments)
    alone.run(
        given,
        _measured,
        num_threads=1,  # a second one that waits for a core is CPU time as well
        layers=given.layers or "all",
    )


def _measured(given: argparse.Namespace) -> list[Row]:
    decoder = Decoder(
        is_small=given.small, num_layers=given.layers, dtype=alone.dtype_of(given)
    )
    voices = {seconds: voice_of(seconds) for seconds in REFERENCE_SECONDS}
    decoder.speak(codes_of(1, 1), voices[3])  # the first run makes what others find
    seen: dict[tuple[int, int], list[tuple[float, float]]] = {
        (spoken, reference): [] for spoken in SPOKEN_SECONDS for reference in voices
    }
    for number in range(given.rounds):
        for spoken, reference in list(seen)[:: 1 if number % 2 == 0 else -1]:
            times = decoder.speak(codes_of(spoken, seed=99), voices[reference])
            seen[spoken, reference].append(times)
            shown = ", ".join(f"{seconds:.2f}" for seconds in times)
            what = f"{spoken} s behind {reference} s"
            print(f"  {number} {what}: {shown} s", file=sys.stderr, flush=True)
    texts = [codes_of(3, seed) for seed in (98, 99)]
    equal, of_all = decoder.num_equal_keys(texts, voices[3])
    what = f"of {of_all} layers and steps, whose reference's keys no text changes"
    return [*_times(seen), Row(what, "", Summary.of([equal]), **_SCENARIO)]


def _times(seen: dict[tuple[int, int], list[tuple[float, float]]]) -> list[Row]:
    """The flow's beside what it takes without a reference, and the vocoder's."""
    rows = []
    for (spoken, reference), times in seen.items():
        flow, vocoder = (Summary.of(each) for each in zip(*times, strict=True))
        alone = Summary.of([without for without, _ in seen[spoken, 0]])
        what = f"{spoken} s of speech, {reference} s of reference"
        rows += [
            Row(f"flow, {what}", "s", flow, alone, versus="no reference", **_SCENARIO),
            Row(f"vocoder, {what}", "s", vocoder, **_SCENARIO),
        ]
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
