"""Where the files of the checkpoint that the host serves are."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from vllm_tts_cache.errors import CheckpointError


def local_checkpoint(model_config: Any) -> Path:
    """Return the folder of the checkpoint that the host has loaded already."""
    return checkpoint_dir(model_config.model, model_config.revision)


def checkpoint_dir(model: str, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint: a folder, or a Hugging Face id.

    Raises: CheckpointError if it is neither, or was not downloaded.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as exc:
        raise CheckpointError(
            model, "neither a directory nor a downloaded Hugging Face model"
        ) from exc
