"""CosyVoice3 as it is measured, and what stock is changed by to run here."""

import os
from pathlib import Path
from typing import Any

from benchmarks.models import TRANSCRIPT, Model, StockSide
from benchmarks.server_plugins import CHECKPOINT, is_server_process
from vllm_tts_cache.families.cosyvoice3.family import FAMILY

# What a cold request speaks. The tiny talker ends by chance, after 0.5 to 2.7 s of
# speech, and each second of it costs as much as half the encode that is measured.
NUM_COLD_TOKENS = 10

OWN_TOKENIZER = f"{__name__}:own_tokenizer"


def own_tokenizer() -> None:
    """Have stock compute speech tokens by the checkpoint's own file.

    It downloads another network for that, of a gigabyte, which has nothing to do with
    the tiny checkpoint. So it encodes as much as ours, and where it always does: in the
    API process, and once in each stage, which tries at start what it is made for.
    """
    if not is_server_process():
        return
    import numpy as np
    import torch
    from vllm_omni.model_executor.models.cosyvoice3.cosyvoice3 import (
        CosyVoice3MultiModalProcessor,
    )

    from vllm_tts_cache.audio.reference import ReferenceAudio
    from vllm_tts_cache.families.cosyvoice3.encoders import load_onnx
    from vllm_tts_cache.families.cosyvoice3.features import tokenizer_frames

    path = Path(os.environ[CHECKPOINT]) / "speech_tokenizer_v3.onnx"
    network = load_onnx(path, num_inputs=2)

    def extract(_self: Any, audio: Any, return_device: Any) -> Any:
        samples, rate_hz = audio
        given = ReferenceAudio.of(np.asarray(samples, np.float32), int(rate_hz))
        frames = tokenizer_frames(given)
        length = np.array([frames.shape[2]], np.int32)
        codes = torch.from_numpy(network(frames.numpy(), length).astype(np.int32))
        num_codes = torch.tensor([codes.shape[1]], dtype=torch.int32)
        return codes.to(return_device), num_codes.to(return_device)

    processor: Any = CosyVoice3MultiModalProcessor
    processor._extract_speech_token_via_s3 = extract


# There is no speech without a voice, and the host itself does the less the shorter the
# reference is. So what a length costs is counted above the shortest one's.
COSYVOICE3 = Model(
    name="cosyvoice3",
    family=FAMILY,
    options={"encoders": "real"},
    scenarios=frozenset({"warm_hit", "first_request", "cold_bystander"}),
    modes={"zero-shot": {"ref_text": TRANSCRIPT}},
    inline={"ref_text": TRANSCRIPT, "max_new_tokens": NUM_COLD_TOKENS},
    limit=lambda _checkpoint: {"voice": "warm-3"},
    message_max_bytes=4096,
    speaker_cpu_max_ms=0.5,
    cold_seconds=25,
    first_max_ratio=1.1,
    stock=StockSide(
        server_plugins=(OWN_TOKENIZER,),
        note="stock encodes by the checkpoint's own files",
    ),
)

MODELS = (COSYVOICE3,)
