"""Puts a worker's speaker side together from the settings; the one place that does."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from vllm_tts_cache.config import load_settings
from vllm_tts_cache.families.load import load_reference_encoders
from vllm_tts_cache.model_executor.speakers import WorkerSpeakers
from vllm_tts_cache.store.audio_wiring import open_audio
from vllm_tts_cache.store.wiring import open_cache

# Encoding in place holds up every stream of the worker, so it does not get the
# patience of a request that waits outside the engine.
IN_PLACE_MAX_SECONDS = 30.0


def load_worker_speakers(vllm_config: Any) -> WorkerSpeakers:
    """Load the checkpoint's reference encoders and open the cache.

    Raises: TTSCacheError if the checkpoint's encoders are not what they should be.
    """
    settings = load_settings()
    device = _own_device(vllm_config.device_config.device)
    model = vllm_config.model_config
    encoders = load_reference_encoders(local_checkpoint(model), device)
    return WorkerSpeakers(
        encoders=encoders,
        cache=open_cache(settings),
        audio=open_audio(settings),
        device=device,
        encode_timeout_seconds=min(
            settings.encode_timeout_seconds, IN_PLACE_MAX_SECONDS
        ),
        encode_yield_seconds=settings.encode_yield_seconds,
    )


def _own_device(device: torch.device | str) -> torch.device:
    """Add the index: the host names the kind only, and a new thread starts at 0."""
    kind = torch.device(device)
    if kind.type == "cuda" and kind.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return kind


def local_checkpoint(model_config: Any) -> Path:
    """Return the folder of the checkpoint that the host has loaded already."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    revision = model_config.revision
    return Path(
        snapshot_download(model_config.model, revision=revision, local_files_only=True)
    )
