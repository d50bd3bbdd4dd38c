"""The reference encoder of a Higgs Audio v3 checkpoint, out of its own weights.

The host encodes with a copy that it fetches from another repository at the first clone.
"""

from pathlib import Path

import torch

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.higgs_audio_v3.family import CODEC, MODEL_TYPE
from vllm_tts_cache.families.networks.higgs_tokenizer.encoder import (
    PREPARATION,
    HiggsEncoder,
    check_sizes,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import RELEASED, sizes_of
from vllm_tts_cache.families.networks.higgs_tokenizer.tokenizer import (
    build_higgs_tokenizer,
)
from vllm_tts_cache.families.networks.resample import RESAMPLER
from vllm_tts_cache.speaker.checkpoint import read_tensors
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.reference import ReferenceEncoder

CODEC_PREFIX = "tied.embedding.modality_embeddings.0.model."
# Of the config, where the tokenizer is not of the released sizes; no released
# checkpoint has it.
SIZES = "audio_tokenizer_config"


def load_reference_encoders(
    model_dir: Path, device: torch.device
) -> dict[str, ReferenceEncoder]:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises:
        CheckpointError: It is of another model, brings no tokenizer, or one that is
            built otherwise; the message names what.
    """
    path = str(model_dir / "config.json")
    config = read_json(model_dir / "config.json")
    if (found := config.get("model_type")) != MODEL_TYPE:
        reason = f"model_type is {found!r}; voices are cloned by {MODEL_TYPE!r} only"
        raise CheckpointError(path, reason)
    given = config.get(SIZES)
    sizes = RELEASED if given is None else sizes_of(given, path=f"{path} {SIZES}")
    check_sizes(sizes, path=path)
    tokenizer = build_higgs_tokenizer(
        sizes,
        read_tensors(model_dir, CODEC_PREFIX),
        device,
        path=f"{model_dir} {CODEC_PREFIX}*",
        resampler=RESAMPLER,
        preparation=PREPARATION,
    )
    return {CODEC: HiggsEncoder(tokenizer=tokenizer)}
