"""The reference encoder of Higgs Audio v2: a tokenizer beside its checkpoint."""

from pathlib import Path

import torch

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.higgs_audio_v2 import family
from vllm_tts_cache.families.networks.higgs_tokenizer import encoder
from vllm_tts_cache.families.networks.resample import RESAMPLER
from vllm_tts_cache.speaker.reference import Encoders


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoder of a checkpoint, as `Family.encoders_part` says.

    Raises: CheckpointError if the tokenizer is missing, or of another build; the
    message says what to do, or names the difference.
    """
    if (folder := family.tokenizer_folder(model_dir)) is None:
        reason = family.why_it_clones_nothing(model_dir)
        raise CheckpointError(str(model_dir), reason or "its tokenizer is gone")
    loaded = encoder.load_higgs_encoder(folder, device, RESAMPLER)
    encoder.check_sizes(loaded.sizes, path=folder)
    return {family.CODEC: loaded}
