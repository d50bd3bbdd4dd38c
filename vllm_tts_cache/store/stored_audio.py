"""The bytes of a stored audio, in the form of today and in the one before."""

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import EncodingCorruptError, SourceCorruptError
from vllm_tts_cache.store import audio_file, serde
from vllm_tts_cache.store.keys import AUDIO_KIND, EncodingKey


def to_bytes(decoded: DecodedAudio) -> bytes:
    """The whole file; it takes up to a second of CPU."""
    key = _key(decoded.audio.audio_sha256)
    return serde.encode(key, audio_file.to_encoding(decoded.audio, decoded.source))


def from_bytes(blob: bytes, audio_sha256: str) -> ReferenceAudio:
    """Verify and decode a file of either form.

    Raises:
        SourceCorruptError: Not such a file, or of another audio.
    """
    if not serde.is_encoding(blob):
        return audio_file.from_v1_bytes(blob, audio_sha256)
    try:
        encoding = serde.decode(blob, _key(audio_sha256))
    except EncodingCorruptError as exc:
        raise SourceCorruptError(audio_sha256, exc.reason) from exc
    return audio_file.from_encoding(encoding, audio_sha256)


def _key(audio_sha256: str) -> EncodingKey:
    return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=AUDIO_KIND)
