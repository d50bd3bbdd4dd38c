"""Higgs Audio v3 as it is measured, and what stock is changed by to run offline."""

import os
from pathlib import Path
from typing import Any

from benchmarks.models import TRANSCRIPT, Model, StockSide
from benchmarks.server_plugins import CHECKPOINT, is_server_api
from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY

OWN_TOKENIZER = f"{__name__}:own_tokenizer"


def own_tokenizer() -> None:
    """Have stock encode with the checkpoint's own tokenizer, as ours does.

    It would fetch a copy of the released one from another repository at the first
    clone, and here is neither a network nor a reason to measure another size. It
    encodes in the API process.
    """
    if not is_server_api():
        return
    from vllm_omni.model_executor.models.higgs_audio_v2 import higgs_audio_v2_tokenizer

    host: Any = higgs_audio_v2_tokenizer
    host._load_audio_tokenizer = lambda: _tokenizer(Path(os.environ[CHECKPOINT]))


def _tokenizer(checkpoint: Path) -> Any:
    from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel

    from vllm_tts_cache.families.higgs_audio_v3.encoders import CODEC_PREFIX, SIZES
    from vllm_tts_cache.speaker.checkpoint import read_tensors
    from vllm_tts_cache.speaker.checkpoint_dir import read_json

    config = read_json(checkpoint / "config.json")[SIZES]
    network = HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig(**config))
    network.load_state_dict(read_tensors(checkpoint, CODEC_PREFIX), strict=False)
    return network.float().eval()


HIGGS_AUDIO_V3 = Model(
    name="higgs-audio-v3",
    family=FAMILY,
    scenarios=frozenset(
        {"warm_hit", "ttfa", "kv_prefix", "cold_bystander", "first_request"}
    ),
    modes={"in-context": {"ref_text": TRANSCRIPT}},
    inline={"ref_text": TRANSCRIPT},
    limit=lambda _checkpoint: {},  # text without a voice
    message_max_bytes=4096,
    speaker_cpu_max_ms=1.0,
    cold_seconds=25,
    first_max_ratio=1.1,
    stock=StockSide(
        server_plugins=(OWN_TOKENIZER,),
        note="stock with the checkpoint's tokenizer",
    ),
    shares_kv=True,
)

MODELS = (HIGGS_AUDIO_V3,)
