"""Which path belongs to which key. Nothing here touches the disk."""

import re
from pathlib import Path

from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.keys import EncodingKey, Segment
from vllm_tts_cache.store.serde import FORMAT_VERSION

SUFFIX = ".safetensors"

_ADDRESS = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"v([0-9]{1,4})")
_STORED = re.compile(
    rf"(?:{'|'.join(segment.value for segment in Segment)})"
    r"/([0-9a-f]{2})/(\1[0-9a-f]{62})/([0-9a-f]{64})" + re.escape(SUFFIX)
)


class DiskLayout:
    """``<root>/v2/<segment>/<2 hex>/<audio_sha256>/<encoder_fingerprint>.safetensors``.

    One directory per audio and segment, so that forgetting an audio does not have
    to know which encoders ever ran.
    """

    def __init__(self, root: Path):
        self.root = root
        self.blobs = root / f"v{FORMAT_VERSION}"
        self.quarantine = root / "quarantine"
        self._segments = {
            segment: f"{self.blobs}/{segment.value}" for segment in Segment
        }

    def segment_directory(self, segment: Segment) -> Path:
        """Everything of one segment."""
        return self.blobs / segment.value

    def audio_directory(self, audio_sha256: str, segment: Segment) -> Path:
        """Everything of one audio in one segment.

        Raises:
            StorageError: Not 64 lower-case hex digits.
        """
        address = _checked(audio_sha256)
        return Path(f"{self._segments[segment]}/{address[:2]}/{address}")

    def file_name(self, key: EncodingKey, segment: Segment) -> str:
        """Where the encoding is, or would be.

        A string, because making a ``Path`` takes as long as asking the disk.

        Raises:
            StorageError: A part of the key is not 64 lower-case hex digits.
        """
        audio, encoder = _checked(key.audio_sha256), _checked(key.encoder_fingerprint)
        return f"{self._segments[segment]}/{audio[:2]}/{audio}/{encoder}{SUFFIX}"

    def quarantine_directory(self, audio_sha256: str) -> Path:
        """Where corrupt encodings of one audio are set aside."""
        return self.quarantine / _checked(audio_sha256)

    def is_older_version(self, name: str) -> bool:
        """Whether an entry of the root holds a format before this one."""
        version = _VERSION.fullmatch(name)
        return version is not None and int(version[1]) < FORMAT_VERSION

    def key_of(self, path: Path) -> EncodingKey | None:
        """Return the key that a path below ``blobs`` names; None if it names none."""
        stored = _STORED.fullmatch(path.relative_to(self.blobs).as_posix())
        if stored is None:
            return None
        return EncodingKey(audio_sha256=stored[2], encoder_fingerprint=stored[3])


def _checked(address: str) -> str:
    # Keys arrive over RPC; none of them may name a path of its own choosing.
    if not _ADDRESS.fullmatch(address):
        raise StorageError(f"Not a content address: {address!r}")
    return address
