"""The reference encoders of a checkpoint, whatever its family."""

from pathlib import Path

import torch

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.speaker.checkpoint import read_json
from vllm_tts_cache.speaker.family import ReferenceEncoder


def load_reference_encoders(
    model_dir: Path, device: torch.device
) -> dict[str, ReferenceEncoder]:
    """All reference encoders of the checkpoint, by name.

    Args:
        model_dir: The checkpoint in its released layout.
        device: Where they compute.

    Raises:
        CheckpointError: It is of no family that we know, or its encoders are not what
            they should be; the message says what is wrong.
    """
    config = model_dir / "config.json"
    # Imported one by one, since each family imports the host's classes for its own.
    match read_json(config).get("model_type"):
        case "qwen3_tts":
            from vllm_tts_cache.families.qwen3_tts import load as qwen3_tts

            return qwen3_tts.load_reference_encoders(model_dir, device)
        case "fish_qwen3_omni":
            from vllm_tts_cache.families.fish_speech import load as fish_speech

            return fish_speech.load_reference_encoders(model_dir, device)
        case other:
            raise CheckpointError(
                str(config),
                f"model_type is {other!r}; known are 'qwen3_tts' and 'fish_qwen3_omni'",
            )
