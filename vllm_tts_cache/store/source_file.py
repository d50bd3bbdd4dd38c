"""The file format of stored reference audio: safetensors that stock adapters read too.

One tensor ``audio``, ``(num_samples,)`` float32, with the metadata ``sample_rate`` (Hz,
in decimal) and ``audio_sha256``.
"""

import json
from typing import Any

import safetensors.numpy
from safetensors import SafetensorError

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import SourceCorruptError

_TENSOR = "audio"
_NOT_AUDIO = (
    SafetensorError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def to_bytes(audio: ReferenceAudio) -> bytes:
    """The whole file."""
    metadata = {
        "sample_rate": str(audio.sample_rate_hz),
        "audio_sha256": audio.audio_sha256,
    }
    return safetensors.numpy.save({_TENSOR: audio.samples}, metadata=metadata)


def from_bytes(data: bytes, audio_sha256: str) -> ReferenceAudio:
    """Parse a file and recompute its address.

    Raises:
        SourceCorruptError: Not such a file, or of another audio.
    """
    try:
        metadata = _metadata(data)
        samples = safetensors.numpy.load(data)[_TENSOR]
        audio = ReferenceAudio.of(samples, int(metadata["sample_rate"]))
    except _NOT_AUDIO as exc:
        raise SourceCorruptError(audio_sha256, f"cannot be parsed: {exc!r}") from exc
    if not audio.audio_sha256 == metadata.get("audio_sha256") == audio_sha256:
        raise SourceCorruptError(
            audio_sha256, f"holds the audio {audio.audio_sha256} by its samples"
        )
    return audio


def _metadata(data: bytes) -> dict[str, Any]:
    # safetensors gives metadata only through safe_open, which wants a path and reports
    # every failure to open one, too many open files included, as a missing file.
    num_header_bytes = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + num_header_bytes])["__metadata__"]
