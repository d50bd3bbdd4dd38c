"""The reference encoder of Higgs Audio v2: a tokenizer beside its checkpoint."""

from pathlib import Path

import torch

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.higgs_audio_v2.family import (
    CODEC,
    tokenizer_folder,
    why_it_clones_nothing,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.encoder import (
    PREPARATION,
    HiggsEncoder,
    check_sizes,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.tokenizer import (
    load_higgs_tokenizer,
)
from vllm_tts_cache.families.networks.resample import RESAMPLER
from vllm_tts_cache.speaker.reference import ReferenceEncoder


def load_reference_encoders(
    model_dir: Path, device: torch.device
) -> dict[str, ReferenceEncoder]:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises:
        CheckpointError: The tokenizer is not there, or is built otherwise; the message
            says what to do, or names what.
    """
    if (folder := tokenizer_folder(model_dir)) is None:
        reason = why_it_clones_nothing(model_dir)
        raise CheckpointError(str(model_dir), reason or "its tokenizer is gone")
    tokenizer = load_higgs_tokenizer(
        folder, device, resampler=RESAMPLER, preparation=PREPARATION
    )
    check_sizes(tokenizer.sizes, path=str(folder))
    return {CODEC: HiggsEncoder(tokenizer=tokenizer)}
