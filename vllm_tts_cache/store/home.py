"""Which directory a process keeps speakers in, told from any other of the same path.

A worker may run on another machine than the API process. A path says nothing there; so
the directory holds a file with an id of its own, and processes compare that.
"""

import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.files import publish_once

FILE_NAME = "directory-id"
_ID_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHome:
    """A process's ``SPEAKER_SAMPLES_DIR``.

    Attributes:
        id: What its marker file holds; empty if there is none.
        place: Host and path, for people.
    """

    id: str = ""
    place: str = ""

    def is_elsewhere(self, other: "StoreHome") -> bool:
        """Tell whether these are two directories; False where nobody can know."""
        return bool(self.id and other.id) and self.id != other.id


def mark(root: Path) -> None:
    """Give the directory its id, unless it has one.

    It serves a diagnosis only: a disk that does not take it is no error.
    """
    with suppress(OSError):
        publish_once(root / FILE_NAME, secrets.token_hex(_ID_BYTES).encode())


def home_of(root: Path) -> StoreHome:
    """Return a directory as this process sees it; nothing is written."""
    found = ""
    with suppress(OSError, UnicodeDecodeError):
        found = (root / FILE_NAME).read_text(encoding="ascii").strip()
    return StoreHome(id=found, place=f"{socket.gethostname()}:{root}")
