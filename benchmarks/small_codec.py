"""Stock's Fish Speech as far as a CPU needs it changed: a plugin of stock's servers.

* Its codec has the sizes that the checkpoint's ``codec.json`` says, as ours has. The
  host knows the released sizes only, with which a core takes 52 s to encode 30 s.
* It pins no memory where there is no accelerator to pin it for: there PyTorch raises,
  and no request would be answered.

See `server_plugins`.
"""

import functools
import multiprocessing
import os
from pathlib import Path
from typing import Any

VARIABLE = "BENCHMARK_CHECKPOINT"


def register() -> None:
    """Rebind both in a stage's process; safe to call again. The API has no codec."""
    if multiprocessing.parent_process() is None:
        return
    import torch
    from vllm_omni.model_executor.models.fish_speech import (
        dac_encoder,
        fish_speech_dac_decoder,
    )

    from vllm_tts_cache.families.fish_speech.codec import build_codec, read_sizes

    sizes = read_sizes(Path(os.environ[VARIABLE]))
    importers: tuple[Any, ...] = (dac_encoder, fish_speech_dac_decoder)
    for module in importers:  # each has a name of its own for it
        module.build_dac_codec = functools.partial(build_codec, sizes)
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = _stay  # pyright: ignore[reportAttributeAccessIssue]


def _stay(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor
