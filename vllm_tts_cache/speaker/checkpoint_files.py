"""A checkpoint's files as the API process and the commands read them: without torch."""

import json
from pathlib import Path
from typing import Any

from vllm_tts_cache.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: It cannot be read, or is none.
    """
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    except ValueError as exc:
        raise CheckpointError(str(path), f"not JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise CheckpointError(str(path), "not a JSON object")
    return parsed


def config_says(model_dir: Path, field: str, value: object) -> bool:
    """Tell whether a checkpoint's ``config.json`` has this value in this field."""
    try:
        return read_json(model_dir / "config.json").get(field) == value
    except CheckpointError:
        return False
