"""Plugins of the servers that we start, and of no other.

vLLM-Omni loads its general plugins in every process of a server. Their metadata is
written into the server's work directory, which only its PYTHONPATH names. Each of the
plugins below acts in the processes of the stages only: the API process has no network.
"""

import functools
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DECODER_PROBE = f"{__name__}:decoder_probe"
FLOAT32_ENCODERS = f"{__name__}:float32_encoders"
SMALL_CODEC = f"{__name__}:small_codec"

DECODES_FILE = "BENCHMARK_DECODER_FILE"
CHECKPOINT = "BENCHMARK_CHECKPOINT"
_NAME = "benchmark_server_plugins"
_METADATA = f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n"
_MARK = "benchmark_was_here"


def announce(directory: Path, entries: Sequence[str]) -> None:
    """Make ``directory``, as part of PYTHONPATH, announce each entry.

    An entry is ``module:function``, or a module whose ``register`` is meant.
    """
    info = directory / f"{_NAME}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    lines = [
        f"plugin_{number} = {entry if ':' in entry else f'{entry}:register'}"
        for number, entry in enumerate(entries)
    ]
    group = "\n".join(["[vllm_omni.general_plugins]", *lines, ""])
    (info / "entry_points.txt").write_text(group)


def decoder_probe() -> None:
    """Time each step of the codec decoder, while ``BENCHMARK_DECODER_FILE`` exists.

    A line of JSON is appended to that file per step.
    """
    if _is_api_process():
        return
    from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_code2wav import (
        Qwen3TTSCode2Wav as Decoder,
    )

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


def float32_encoders() -> None:
    """Compute stock's host-side reference encoders in float32, as ours do.

    A CPU without AVX-512 computes a bfloat16 convolution some 20 times slower than a
    float32 one: a 30 s reference then takes stock minutes, which says nothing about
    stock on the hardware it is made for. In float32 the two are compared at their
    work. The talker that is patched is the one that both sides' talkers are.
    """
    if _is_api_process():
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


def small_codec() -> None:
    """Change stock's Fish Speech as far as a CPU needs it changed.

    * Its codec has the sizes that the checkpoint's ``codec.json`` says, as ours has.
      The host knows the released sizes only, with which a core takes 52 s to encode
      30 s.
    * It pins no memory where there is no accelerator to pin it for: there PyTorch
      raises, and no request would be answered.
    """
    if _is_api_process():
        return
    import torch
    from vllm_omni.model_executor.models.fish_speech import (
        dac_encoder,
        fish_speech_dac_decoder,
    )

    from vllm_tts_cache.families.fish_speech.codec import build_codec, read_sizes

    sizes = read_sizes(Path(os.environ[CHECKPOINT]))
    importers: tuple[Any, ...] = (dac_encoder, fish_speech_dac_decoder)
    for module in importers:  # each has a name of its own for it
        module.build_dac_codec = functools.partial(build_codec, sizes)
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = _stay  # pyright: ignore[reportAttributeAccessIssue]


def _is_api_process() -> bool:
    return multiprocessing.parent_process() is None


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


def _stay(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor
