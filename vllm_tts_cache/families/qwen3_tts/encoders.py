"""Loading the reference encoders of a Qwen3-TTS checkpoint."""

from pathlib import Path

import torch

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.networks.qwen3_codec.encoder import load_codec_encoder
from vllm_tts_cache.families.qwen3_tts.family import kind_of
from vllm_tts_cache.families.qwen3_tts.speaker_encoder import load_speaker_encoder
from vllm_tts_cache.speaker.checkpoint_dir import read_json
from vllm_tts_cache.speaker.reference import Encoders, ReferenceEncoder

# Fields of the config that tell whether these two encoders are the checkpoint's.
_EXPECTED = {
    "model_type": "qwen3_tts",
    "tts_model_type": "base",
    "tokenizer_type": "qwen3_tts_tokenizer_12hz",
}


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises:
        CheckpointError: It is no Base checkpoint with the 12 Hz codec, or a tensor
            is missing or of another shape; the message names the field or tensors.
    """
    config = read_json(model_dir / "config.json")
    for field, expected in _EXPECTED.items():
        found = config.get(field)
        if (kind_of(config) if field == "tts_model_type" else found) != expected:
            reason = f"{field} is {found!r}; voices are cloned by {expected!r} only"
            raise CheckpointError(str(model_dir / "config.json"), reason)
    encoders: tuple[ReferenceEncoder, ...] = (
        load_speaker_encoder(model_dir, config, device),
        load_codec_encoder(model_dir / "speech_tokenizer", device),
    )
    return {encoder.name: encoder for encoder in encoders}
