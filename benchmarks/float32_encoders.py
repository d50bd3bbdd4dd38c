"""Both servers' host-side reference encoders in float32, on CPUs slow in bfloat16.

A CPU without AVX-512 computes a bfloat16 convolution some 200 times slower than a
float32 one: a 30 s reference then takes stock minutes, which says nothing about stock
on the hardware it is made for. In float32, which is what ours computes in, the two
are compared at their work. A plugin of the servers, see `server_plugins`.
"""

import functools
import multiprocessing
from typing import Any

_NAME = "benchmark_float32_encoders"


def register() -> None:
    """Patch the talker that both sides' talkers are; the API process has none."""
    if multiprocessing.parent_process() is None:
        return
    from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
        Qwen3TTSTalkerForConditionalGeneration as Talker,
    )

    if getattr(Talker, _NAME, False):
        return
    # The first use of the encoder, while the weights are being loaded.
    first_use = Talker._init_silence_mask

    @functools.wraps(first_use)
    def in_float32(talker: Any) -> Any:
        _use_float32(talker)
        return first_use(talker)

    Talker._init_silence_mask = in_float32
    setattr(Talker, _NAME, True)


def _use_float32(talker: Any) -> None:
    encode = talker.encoder.float().encode

    def encode_float32(input_values: Any, **kwargs: Any) -> Any:
        return encode(input_values=input_values.float(), **kwargs)

    talker.encoder.encode = encode_float32
    builder = talker._prompt_builder
    builder._speaker_encoder = _Float32Module(builder._speaker_encoder)


class _Float32Module:
    """A module that is called in float32, and that its user cannot cast back."""

    def __init__(self, module: Any):
        self._module = module.float()

    def parameters(self) -> Any:
        return iter(())

    def __call__(self, inputs: Any) -> Any:
        return self._module(inputs.float())
