"""Where corrupt encodings are set aside, to be studied and in nobody's way."""

from pathlib import Path

from vllm_tts_cache.store.tiers.base import Budget
from vllm_tts_cache.store.tiers.disk_sweep import plan_sweep, scan

# Enough to study what a failing disk does, and no place for voices to pile up.
_BUDGET = Budget(max_bytes=64 * 1024**2)


def set_aside(path: Path, directory: Path, quarantine: Path) -> int | None:
    """Move a corrupt file to ``directory``, which is below ``quarantine``.

    Returns its size; None if another reader was first.

    Raises:
        OSError: It may still be where it was.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        num_bytes = path.stat().st_size
        path.replace(directory / path.name)
        plan_sweep(scan(quarantine), _BUDGET).execute()
    except FileNotFoundError:
        return None
    return num_bytes
