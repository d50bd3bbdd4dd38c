"""What the bytes of any stored file have to be, and what it is called before people."""

from vllm_tts_cache.catalogue.record import AUDIO_KIND
from vllm_tts_cache.store import audio_file, serde
from vllm_tts_cache.store.encoding import EncodingKey


def check(data: bytes, audio_sha256: str, kind: str) -> None:
    """See that bytes are the file of this address and kind.

    Raises: SourceCorruptError, EncodingCorruptError.
    """
    if kind == AUDIO_KIND:
        audio_file.from_bytes(data, audio_sha256)
    else:
        key = EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=kind)
        serde.decode(data, key)


def named(kind: str) -> str:
    """What a file of this kind is called in a message."""
    return "audio" if kind == AUDIO_KIND else f"encoding by {kind[:16]}"
