"""A file of voices is there as a whole, or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.files import PARTIAL_PREFIX


@contextmanager
def whole_file(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Give a file that takes its place at ``path`` when the block ends well.

    Raises:
        StorageError: Something is there, and is not to be replaced, or is no file.
        OSError: It cannot be written.
    """
    # A rename would put a file in the place of a device, for all who use it.
    if path.exists() and not path.is_file():
        raise StorageError(f"{path} is no file that could be replaced")
    if path.exists() and not force:
        raise StorageError(f"{path} is there already; --force replaces it")
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=PARTIAL_PREFIX)
    try:
        # Whole, or not there: somebody may restore from it one day.
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)
