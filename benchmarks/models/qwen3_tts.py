"""Qwen3-TTS as it is measured, and what its servers are changed by."""

import dataclasses
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.models import TRANSCRIPT, Model, StockSide
from benchmarks.server_plugins import DECODES_FILE, is_api_process
from vllm_tts_cache.families.qwen3_tts.family import FAMILY

DECODER_PROBE = f"{__name__}:decoder_probe"
FLOAT32_ENCODERS = f"{__name__}:float32_encoders"
_CODEC_END = 2150  # the token that ends an answer
_MARK = "benchmark_was_here"


def decoder_probe() -> None:
    """Time each step of the codec decoder, while ``BENCHMARK_DECODER_FILE`` exists.

    A line of JSON is appended to that file per step.
    """
    if is_api_process():
        return
    Decoder: Any = _decoder_class()
    if getattr(Decoder, _MARK, False):
        return
    path, decode = Path(os.environ[DECODES_FILE]), Decoder.forward

    @functools.wraps(decode)
    def timed(decoder: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not path.exists():
            return decode(decoder, input_ids, *args, **kwargs)
        began = time.perf_counter()
        output = decode(decoder, input_ids, *args, **kwargs)
        seen = {"ms": 1e3 * (time.perf_counter() - began), "num_ids": len(input_ids)}
        with path.open("a") as file:
            file.write(json.dumps(seen) + "\n")
        return output

    Decoder.forward = timed
    setattr(Decoder, _MARK, True)


def _decoder_class() -> Any:
    """The class of the second stage's model: ours does some of it before the host's."""
    if os.environ.get("SPEAKER_CACHE_ENABLED") == "0":
        from vllm_omni.model_executor.models.qwen3_tts import qwen3_tts_code2wav

        return qwen3_tts_code2wav.Qwen3TTSCode2Wav
    from vllm_tts_cache.families.qwen3_tts import code2wav

    return code2wav.CachedQwen3TTSCode2Wav


def float32_encoders() -> None:
    """Compute stock's host-side reference encoders in float32, as ours do.

    A CPU without AVX-512 computes a bfloat16 convolution some 20 times slower than a
    float32 one: a 30 s reference then takes stock minutes, which says nothing about
    stock on the hardware it is made for. In float32 the two are compared at their
    work. The talker that is patched is the one that both sides' talkers are.
    """
    if is_api_process():
        return
    from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
        Qwen3TTSTalkerForConditionalGeneration as Talker,
    )

    if getattr(Talker, _MARK, False):
        return
    # The first use of the encoder, while the weights are being loaded.
    first_use = Talker._init_silence_mask

    @functools.wraps(first_use)
    def in_float32(talker: Any) -> Any:
        _use_float32(talker)
        return first_use(talker)

    Talker._init_silence_mask = in_float32
    setattr(Talker, _MARK, True)


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


def _raw_embedding(checkpoint: Path) -> dict[str, Any]:
    config = json.loads((checkpoint / "config.json").read_text())
    size = config["speaker_encoder_config"]["enc_dim"]
    values = [0.02 * (i % 5 - 2) for i in range(size)]
    return {"speaker_embedding": values, "task_type": "Base"}


QWEN3_TTS = Model(
    name="qwen3-tts",
    family=FAMILY,
    options={"encoders": "real"},
    scenarios=frozenset(
        {
            "warm_hit",
            "ttfa",
            "concurrent_cold",
            "cold_bystander",
            "inline_flood",
            "first_request",
        }
    ),
    modes={"x-vector": {}, "in-context": {"ref_text": TRANSCRIPT}},
    inline={"ref_text": TRANSCRIPT, "task_type": "Base"},
    limit=_raw_embedding,
    message_max_bytes=1024,
    speaker_cpu_max_ms=0.2,
    cold_seconds=25,
    first_max_ratio=1.05,
    server_plugins=(FLOAT32_ENCODERS, DECODER_PROBE),
    times_decoder=True,
)


def _answers_of(num_frames: int) -> dict[str, Any]:
    """Return what gives all answers one length: random weights end by chance."""
    ends = {"min_tokens": num_frames, "logit_bias": {_CODEC_END: 100.0}}
    return {"default_sampling_params": ends}


# What a clone in context costs the codec's decoder is seen in one of its released size.
QWEN3_TTS_DECODER = dataclasses.replace(
    QWEN3_TTS,
    name="qwen3-tts-decoder",
    options={"encoders": "real", "real_decoder": True},
    scenarios=frozenset({"ttfa", "field"}),
    stage_0=_answers_of(32),  # 2.6 s
    stage_1={} if machine.computes_bfloat16() else {"dtype": "float32"},
)

# A clone in context decodes the reference's last frames once, as context of its first
# ones. So what that costs a request depends on the answer's length.
QWEN3_TTS_LONG = dataclasses.replace(
    QWEN3_TTS_DECODER,
    name="qwen3-tts-long",
    scenarios=frozenset({"parity"}),
    stage_0=_answers_of(128),  # 10 s, some twenty words
)

# Stock as it ships, for processors that compute in bfloat16; others take minutes.
QWEN3_TTS_BFLOAT16 = dataclasses.replace(
    QWEN3_TTS,
    name="qwen3-tts-bfloat16",
    scenarios=frozenset({"cold_bystander"}),
    server_plugins=(DECODER_PROBE,),
    stock=StockSide(note="stock encodes in bfloat16, as shipped"),
    is_named_only=True,
)

# With small reference encoders, for what is about numbers of voices and not about
# what one of them costs.
QWEN3_TTS_TINY = dataclasses.replace(
    QWEN3_TTS,
    name="qwen3-tts-tiny",
    options={},
    scenarios=frozenset({"bulk_command", "bulk_registration"}),
    environ={"SPEAKER_MAX_UPLOADED": "1000000"},
    server_plugins=(FLOAT32_ENCODERS,),
    times_decoder=False,
)

MODELS = (
    QWEN3_TTS,
    QWEN3_TTS_DECODER,
    QWEN3_TTS_LONG,
    QWEN3_TTS_BFLOAT16,
    QWEN3_TTS_TINY,
)
