"""The disk tier's own inspection: what lies there and should not."""

import time
from pathlib import Path

from vllm_tts_cache.errors import EncodingCorruptError
from vllm_tts_cache.files import PARTIAL_PREFIX
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.tiers.disk_files import remove, walk
from vllm_tts_cache.store.tiers.disk_layout import DiskLayout


def findings(layout: DiskLayout, partials_older_than_seconds: float) -> list[str]:
    """Read everything; return one line for each file that is wrong, sorted."""
    lines = (
        _finding(layout, p, partials_older_than_seconds) for p in walk(layout.blobs)
    )
    return sorted(line for line in lines if line is not None)


def remove_partials(layout: DiskLayout, older_than_seconds: float) -> int:
    """Remove half-written files that killed processes left; return how many."""
    partials = [p for p in walk(layout.blobs) if p.name.startswith(PARTIAL_PREFIX)]
    old = [p for p in partials if _is_older(p, older_than_seconds)]
    return sum(remove(path) is not None for path in old)


def _finding(layout: DiskLayout, path: Path, partial_age: float) -> str | None:
    if path.name.startswith(PARTIAL_PREFIX):
        return f"partial: {path}" if _is_older(path, partial_age) else None
    if (key := layout.key_of(path)) is None:
        return f"misnamed: {path}"
    try:
        serde.decode(path.read_bytes(), key)
    except FileNotFoundError:
        return None
    except OSError as exc:
        return f"unreadable: {path}: {exc.strerror}"
    except EncodingCorruptError as exc:
        return f"corrupt: {path}: {exc.reason}"
    return None


def _is_older(path: Path, seconds: float) -> bool:
    try:
        return time.time() - path.lstat().st_mtime >= seconds
    except FileNotFoundError:
        return False
