"""Which of several API processes shows what all of them would be told alike."""

import fcntl
import os
from pathlib import Path

_LOCK_NAME = "vllm-tts-cache.lock"


class Turn:
    """The right to show what the workers and the catalogue say.

    With ``--api-server-count`` above 1 the host adds up what all API processes have
    written into one directory. So the lock is a file there: it is shared by just those
    whose counts are added up. Whoever holds it keeps it until it ends.

    Args:
        directory: That directory; None where there is one process.
    """

    def __init__(self, directory: Path | None):
        self._path = None if directory is None else directory / _LOCK_NAME
        self._handle: int | None = None
        self._is_ours = directory is None
        self.is_first = True

    def is_ours(self) -> bool:
        """Tell whether this process is the one, taking the turn if nobody has it.

        Afterwards ``is_first`` tells whether nobody had it before: else what was
        counted so far has been shown, and stays in the directory.

        Raises: OSError.
        """
        if not self._is_ours:
            self._is_ours = self._take()
        return self._is_ours

    def close(self) -> None:
        """Leave it to the others."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            self._is_ours = False

    def _take(self) -> bool:
        assert self._path is not None
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_first = os.fstat(handle).st_size == 0
            os.write(handle, b"taken\n")
        except BlockingIOError:
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return True
