"""The reference encoder of Breeze-TTS-2: Qwen3's codec, in a folder of its own."""

from pathlib import Path

import torch

from vllm_tts_cache.families.breeze_tts_2.family import CODEC, CODEC_FOLDER
from vllm_tts_cache.families.networks.qwen3_codec import frames
from vllm_tts_cache.families.networks.qwen3_codec.encoder import load_codec_encoder
from vllm_tts_cache.speaker.checkpoint_dir import check_rates
from vllm_tts_cache.speaker.reference import Encoders


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises: CheckpointError if a file cannot be read, or weights or settings do not fit.
    """
    folder = model_dir / CODEC_FOLDER
    encoder = load_codec_encoder(folder, device)
    found = encoder.sample_rate_hz, encoder.samples_per_frame
    known = frames.CODEC_RATE_HZ, frames.SAMPLES_PER_FRAME
    check_rates(folder, "{} Hz and {} samples a frame", found=found, known=known)
    return {CODEC: encoder}
