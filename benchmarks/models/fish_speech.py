"""Fish Speech as it is measured, and what stock is changed by to run on a CPU."""

import functools
import os
from pathlib import Path
from typing import Any

from benchmarks.models import TRANSCRIPT, Model, StockSide
from benchmarks.server_plugins import CHECKPOINT, is_api_process
from vllm_tts_cache.families.fish_speech.family import FAMILY

SMALL_CODEC = f"{__name__}:small_codec"


def small_codec() -> None:
    """Change stock's Fish Speech as far as a CPU needs it changed.

    * Its codec has the sizes that the checkpoint's ``codec.json`` says, as ours has.
      The host knows the released sizes only, with which a core takes 52 s to encode
      30 s.
    * It pins no memory where there is no accelerator to pin it for: there PyTorch
      raises, and no request would be answered.
    """
    if is_api_process():
        return
    import torch
    from vllm_omni.model_executor.models.fish_speech import (
        dac_encoder,
        fish_speech_dac_decoder,
    )

    from vllm_tts_cache.families.fish_speech.codec import build_codec
    from vllm_tts_cache.families.fish_speech.sizes import read_sizes

    sizes = read_sizes(Path(os.environ[CHECKPOINT]))
    importers: tuple[Any, ...] = (dac_encoder, fish_speech_dac_decoder)
    for module in importers:  # each has a name of its own for it
        module.build_dac_codec = functools.partial(build_codec, sizes)
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = _stay  # pyright: ignore[reportAttributeAccessIssue]


def _stay(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


# With a small codec: the released one takes a core 52 s for a reference of 30 s, and
# seconds for each chunk it decodes. So no row of it says what a cold reference costs.
FISH_SPEECH = Model(
    name="fish-speech",
    family=FAMILY,
    scenarios=frozenset({"warm_hit", "ttfa", "kv_prefix", "first_request"}),
    modes={"in-context": {"ref_text": TRANSCRIPT}},
    inline={"ref_text": TRANSCRIPT},
    limit=lambda _checkpoint: {},  # text without a voice
    message_max_bytes=8192,
    speaker_cpu_max_ms=2.0,
    cold_seconds=25,
    first_max_ratio=1.1,
    stock=StockSide(
        server_plugins=(SMALL_CODEC,),
        # As the host ships it: its prompts are placeholders, and with prefix caching
        # on it takes the wrong rows of them.
        stage_0={"enable_prefix_caching": False},
        note="stock with the small codec, unpinned",
    ),
    shares_kv=True,
)

MODELS = (FISH_SPEECH,)
