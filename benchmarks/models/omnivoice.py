"""OmniVoice as it is measured, and what stock is changed by to run on a CPU."""

from typing import Any

from benchmarks.models import TRANSCRIPT, Model, StockSide
from benchmarks.server_plugins import is_api_process
from vllm_tts_cache.families.omnivoice.family import FAMILY

WITHOUT_TRITON = f"{__name__}:without_triton"


def without_triton() -> None:
    """Have stock compute without Triton where there is no accelerator, as ours does.

    It takes Triton wherever it can be imported, and would answer no request.
    """
    if is_api_process():
        return
    import torch
    from vllm_omni.model_executor.models.omnivoice import omnivoice_generator

    if not torch.accelerator.is_available():
        host: Any = omnivoice_generator
        host._TRITON_AVAILABLE = False


# Its answers come whole: what a listener waits for is all of one. Stock's encoder is
# the checkpoint's own too, so a cold reference costs both the same network.
OMNIVOICE = Model(
    name="omnivoice",
    family=FAMILY,
    options={"encoders": "real"},
    scenarios=frozenset({"warm_hit", "cold_neighbour", "first_request"}),
    modes={"in-context": {"ref_text": TRANSCRIPT}},
    inline={"ref_text": TRANSCRIPT},
    limit=lambda _checkpoint: {},  # text without a voice
    message_max_bytes=4096,
    speaker_cpu_max_ms=0.5,
    cold_seconds=25,
    first_max_ratio=1.05,
    stock=StockSide(
        server_plugins=(WITHOUT_TRITON,),
        note="stock without Triton; it encodes without the official preparation",
    ),
)

MODELS = (OMNIVOICE,)
