"""Publishing a whole directory, or nothing; and never over somebody else's."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.files import PARTIAL_PREFIX, storage_errors

# A directory that holds this file was written by test equipment.
MARKER = ".random-weights.json"


@contextmanager
def new_directory(out: Path, *, force: bool = False) -> Iterator[Path]:
    """Fill the directory that is yielded; it becomes ``out`` when the block ends.

    If the block raises, ``out`` is as it was.

    Args:
        out: Absent, empty, or, with ``force``, a directory that holds ``MARKER``.
        force: Replace a directory of ours.

    Raises:
        ConfigError: ``out`` must not be overwritten.
        StorageError: The disk failed.
    """
    # A relative path may be "." or end in "..", which has no sibling to rename.
    out = Path(os.path.abspath(out))  # noqa: PTH100
    _check_replaceable(out, force)
    partial = out.with_name(f"{PARTIAL_PREFIX}{out.name}-{uuid.uuid4().hex}")
    try:
        with storage_errors(out):
            partial.mkdir(parents=True)
            yield partial
            _replace(out, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise ConfigError(f"--out {out}: exists and is not a directory")
    if not any(out.iterdir()):
        return
    if not (out / MARKER).is_file():
        raise ConfigError(
            f"--out {out}: is not empty and was not written by this command, so it is "
            "left alone; choose another directory"
        )
    if not force:
        raise ConfigError(f"--out {out}: holds a test checkpoint; --force replaces it")


def _replace(out: Path, partial: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        partial.rename(out)
        return
    # A directory cannot be renamed over a full one.
    old = out.with_name(f"{PARTIAL_PREFIX}{out.name}-{uuid.uuid4().hex}")
    out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
