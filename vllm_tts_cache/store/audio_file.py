"""The stored forms of reference audio, each of them exact, as named arrays.

Clips that came as whole numbers go back to FLAC; what a lossy decoder made has no
shorter exact form than the upload itself. All forms carry ``sample_rate_hz``, ``(1,)``
int64, and one of

- ``flac``: ``(num_bytes,)`` uint8, a mono FLAC file of 16 or 24 bits,
- ``samples``: ``(num_samples,)`` float32,
- ``upload``: ``(num_bytes,)`` uint8, the file that the client sent.

Several clips of a voice are one audio in the first two forms; ``clip_starts``,
``(num_clips,)`` int64, says at which samples they begin. One clip has none.
"""

import dataclasses
import io
import json
import logging
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import soundfile
from safetensors import SafetensorError

from vllm_tts_cache.audio.containers import read_blocks
from vllm_tts_cache.audio.decode import DecodedAudio, downmix
from vllm_tts_cache.audio.limits import AudioLimits
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.record import AUDIO_KIND
from vllm_tts_cache.errors import (
    EncodingCorruptError,
    InvalidAudioError,
    SourceCorruptError,
    StorageError,
)
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.encoding import Array, Encoding, EncodingKey
from vllm_tts_cache.throttled_log import ThrottledLog

FLAC, SAMPLES, UPLOAD, RATE = "flac", "samples", "upload", "sample_rate_hz"
STARTS = "clip_starts"

# Our own form may be this much larger than the upload and is taken still: it decodes
# to the same samples with every version of every library, and holds no name, picture
# or place that the client's recorder wrote into the file.
_MAX_OVERHEAD = 1.05
# What is stored has passed the limits of its day, whatever today's are.
_NO_LIMITS = AudioLimits(
    min_seconds=0.0,
    max_seconds=math.inf,
    min_rate_hz=1,
    max_rate_hz=1 << 31,
    max_channels=1 << 16,
)
# Bits -> what numbers libsndfile is given, and how far they are shifted up in them.
_GRIDS = {16: (np.int16, 0), 24: (np.int32, 8)}
_NOT_AUDIO = (
    SafetensorError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

_log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))


def to_encoding(audio: ReferenceAudio, source: bytes | None) -> Encoding:
    """Choose the form in which the audio is stored: exact, and no larger than need be.

    It is about as large as the upload at most (5 % and a header of some hundred bytes
    more). It takes some tens of milliseconds, so keep it off an event loop.

    Args:
        audio: What is stored.
        source: The file that ``audio`` was decoded from; None if there was none, or
            several.
    """
    rate = np.array([audio.sample_rate_hz], np.int64)
    name, array = SAMPLES, audio.samples
    if (flac := _exact_flac(audio)) is not None and len(flac) < array.nbytes:
        name, array = FLAC, np.frombuffer(flac, np.uint8)
    if source is not None and len(source) * _MAX_OVERHEAD < array.nbytes:
        name, array = UPLOAD, np.frombuffer(source, np.uint8)
    arrays: dict[str, Array] = {name: array, RATE: rate}
    if audio.num_clips > 1:
        arrays[STARTS] = np.array(audio.clip_starts, np.int64)
    return Encoding(arrays)


def from_encoding(encoding: Encoding, audio_sha256: str) -> ReferenceAudio:
    """Read the audio back, of which the container has proved the bytes already.

    An upload that another version of its decoder reads slightly otherwise is still the
    speaker's clip: it is returned under the address that it is stored by.

    Raises:
        SourceCorruptError: No stored form, or samples of another audio.
        StorageError: The upload is whole, but nothing here decodes it any more.
    """
    try:
        rate = int(encoding[RATE][0])
        form = next(name for name in (FLAC, SAMPLES, UPLOAD) if name in encoding.arrays)
        starts = _starts(encoding)
    except (LookupError, StopIteration, TypeError, ValueError) as exc:
        reason = f"holds no audio but {', '.join(encoding.arrays)}"
        raise SourceCorruptError(audio_sha256, reason) from exc
    if form == UPLOAD and len(starts) == 1:
        return _from_upload(encoding[UPLOAD].tobytes(), audio_sha256)
    try:
        if form == FLAC:
            audio = _decoded(encoding[FLAC].tobytes(), starts)
        else:
            samples = cast("npt.NDArray[np.float32]", encoding[SAMPLES])
            audio = ReferenceAudio.of(samples, rate, starts)
    except (InvalidAudioError, LookupError, ValueError) as exc:
        raise SourceCorruptError(audio_sha256, f"cannot be read: {exc}") from exc
    return _of_address(audio, audio_sha256)


def from_v1_bytes(data: bytes, audio_sha256: str) -> ReferenceAudio:
    """Parse a file of the first format and recompute its address.

    One tensor ``audio``, ``(num_samples,)`` float32, with the metadata ``sample_rate``
    (Hz, in decimal) and ``audio_sha256``.

    Raises:
        SourceCorruptError: Not such a file, or of another audio.
    """
    try:
        metadata = _v1_metadata(data)
        samples = safetensors.numpy.load(data)["audio"]
        audio = ReferenceAudio.of(samples, int(metadata["sample_rate"]))
    except _NOT_AUDIO as exc:
        raise SourceCorruptError(audio_sha256, f"cannot be parsed: {exc!r}") from exc
    if metadata.get("audio_sha256") != audio_sha256:
        raise SourceCorruptError(audio_sha256, "its header names another audio")
    return _of_address(audio, audio_sha256)


def _exact_flac(audio: ReferenceAudio) -> bytes | None:
    """Return a FLAC file that decodes to the same samples, None if there is none."""
    for bits in _GRIDS:
        numbers = _on_grid(audio.samples, bits)
        if numbers is None:
            continue
        file, subtype = io.BytesIO(), f"PCM_{bits}"
        try:
            soundfile.write(file, numbers, audio.sample_rate_hz, subtype, format="FLAC")
            # Believed when seen: this is the only copy of somebody's voice.
            again = _decoded(file.getvalue(), audio.clip_starts)
        except (soundfile.SoundFileError, InvalidAudioError, OverflowError, ValueError):
            return None  # a rate that FLAC does not have
        return file.getvalue() if again.audio_sha256 == audio.audio_sha256 else None
    return None


def _on_grid(samples: npt.NDArray[np.float32], bits: int) -> npt.NDArray[Any] | None:
    """Return the whole numbers that the samples are, None if one is between two."""
    full_scale = 2.0 ** (bits - 1)
    scaled = samples.astype(np.float64) * full_scale
    if scaled.min() < -full_scale or scaled.max() > full_scale - 1:
        return None
    if not np.array_equal(scaled, np.rint(scaled)):
        return None
    kind, shift = _GRIDS[bits]
    return scaled.astype(kind) << shift


def _from_upload(data: bytes, audio_sha256: str) -> ReferenceAudio:
    try:
        audio = _decoded(data)
    except (InvalidAudioError, ValueError) as exc:
        raise StorageError(
            f"The stored upload of audio {audio_sha256} is whole, but cannot be "
            f"decoded by this version of libsndfile or FFmpeg: {exc}"
        ) from exc
    if audio.audio_sha256 == audio_sha256:
        return audio
    _log.warn_of(
        "an upload decodes otherwise",
        "The stored upload of audio %s decodes to other samples than when it was "
        "registered; another version of its decoder is installed. It is used as it "
        "decodes now.",
        audio_sha256,
    )
    return dataclasses.replace(audio, audio_sha256=audio_sha256)


def _decoded(data: bytes, clip_starts: Sequence[int] = (0,)) -> ReferenceAudio:
    mono, _, sample_rate_hz = downmix(read_blocks(data), _NO_LIMITS)
    return ReferenceAudio.of(mono, sample_rate_hz, clip_starts)


def _starts(encoding: Encoding) -> list[int]:
    stored = encoding.arrays.get(STARTS)
    return [0] if stored is None else [int(start) for start in stored]


def _of_address(audio: ReferenceAudio, audio_sha256: str) -> ReferenceAudio:
    if audio.audio_sha256 != audio_sha256:
        reason = f"holds the audio {audio.audio_sha256} by its samples"
        raise SourceCorruptError(audio_sha256, reason)
    return audio


def _v1_metadata(data: bytes) -> dict[str, Any]:
    # safetensors gives metadata only through safe_open, which wants a path and reports
    # every failure to open one, too many open files included, as a missing file.
    num_header_bytes = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + num_header_bytes])["__metadata__"]


def to_bytes(decoded: DecodedAudio) -> bytes:
    """The whole file; it takes up to a second of CPU."""
    key = _key(decoded.audio.audio_sha256)
    return serde.encode(key, to_encoding(decoded.audio, decoded.source))


def from_bytes(blob: bytes, audio_sha256: str) -> ReferenceAudio:
    """Verify and decode a file of either form.

    Raises:
        SourceCorruptError: Not such a file, or of another audio.
    """
    if not serde.is_encoding(blob):
        return from_v1_bytes(blob, audio_sha256)
    try:
        encoding = serde.decode(blob, _key(audio_sha256))
    except EncodingCorruptError as exc:
        raise SourceCorruptError(audio_sha256, exc.reason) from exc
    return from_encoding(encoding, audio_sha256)


def to_client(blob: bytes, audio_sha256: str) -> tuple[bytes, str]:
    """A file that plays anywhere, with the same samples, and its media type.

    Never the upload as it came: what else is in it is not known, nor what it is.

    Raises:
        SourceCorruptError: Not a stored file, or of another audio.
    """
    audio = from_bytes(blob, audio_sha256)
    if serde.is_encoding(blob):
        encoding = serde.decode(blob, _key(audio_sha256))
        if FLAC in encoding.arrays:
            return encoding[FLAC].tobytes(), "audio/flac"
    file = io.BytesIO()
    soundfile.write(file, audio.samples, audio.sample_rate_hz, "FLOAT", format="WAV")
    return file.getvalue(), "audio/wav"


def _key(audio_sha256: str) -> EncodingKey:
    return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=AUDIO_KIND)
