"""The reference encoder of a Higgs Audio v3 checkpoint, from its own weights.

The host encodes with a copy that it fetches from another repository at the first clone.
"""

from pathlib import Path

import torch

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.higgs_audio_v3.family import CODEC, MODEL_TYPE
from vllm_tts_cache.families.networks.higgs_tokenizer import encoder
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import RELEASED, sizes_of
from vllm_tts_cache.families.networks.resample import RESAMPLER
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.reference import Encoders

CODEC_PREFIX = "tied.embedding.modality_embeddings.0.model."
# Key of the config with the tokenizer's sizes, if these are not the released ones; no
# released checkpoint has the key.
SIZES = "audio_tokenizer_config"


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoder of a checkpoint, as `Family.encoders_part` says.

    Raises: CheckpointError if it is of another model, or its tokenizer is missing or of
    another build; the message names the difference.
    """
    path = model_dir / "config.json"
    config = read_json(path)
    if (found := config.get("model_type")) != MODEL_TYPE:
        reason = f"model_type is {found!r}; voices are cloned by {MODEL_TYPE!r} only"
        raise CheckpointError(str(path), reason)
    given = config.get(SIZES)
    sizes = RELEASED if given is None else sizes_of(given, path=f"{path} {SIZES}")
    encoder.check_sizes(sizes, path=path)
    load = encoder.load_higgs_encoder
    given = {"sizes": sizes, "prefix": CODEC_PREFIX}
    return {CODEC: load(model_dir, device, RESAMPLER, **given)}
