"""The stored file of reference audio: one clip or several, as named arrays.

Both carry ``sample_rate_hz``, ``(1,)`` int64. A clip is one array, called after its
form (see `audio_forms`). Several clips of a voice are stored in the shorter way of two:

- behind each other, as ``flac`` or ``samples``, with ``clip_starts``, ``(num_clips,)``
  int64: at which samples they begin,
- each by itself in its own form, as ``0/upload``, ``1/flac`` and so on.
"""

import dataclasses
import io
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy
import soundfile
from safetensors import SafetensorError

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.record import AUDIO_KIND
from vllm_tts_cache.errors import (
    EncodingCorruptError,
    InvalidAudioError,
    SourceCorruptError,
    StorageError,
)
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.audio_forms import (
    FLAC,
    FORMS,
    MAX_OVERHEAD,
    UPLOAD,
    StoredClip,
    read,
    shortest,
)
from vllm_tts_cache.store.encoding import Array, Encoding, EncodingKey
from vllm_tts_cache.throttled_log import ThrottledLog

# After the id, the size and the version of libsndfile's chunk of peaks: Unix seconds.
_PEAK_WRITTEN_AT = 12

RATE, STARTS = "sample_rate_hz", "clip_starts"

_NOT_AUDIO = (
    SafetensorError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

_log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))


def to_encoding(audio: ReferenceAudio, sources: Sequence[bytes] = ()) -> Encoding:
    """Choose how the audio is stored: exact, and no larger than need be.

    It is about as large as the uploads at most (5 % and a header of some hundred bytes
    more). It takes some tens of milliseconds, so keep it off an event loop.

    Args:
        audio: What is stored.
        sources: The file that each clip was decoded from; none if one never was one.
    """
    rate = {RATE: np.array([audio.sample_rate_hz], np.int64)}
    if audio.num_clips == 1:
        stored = shortest(audio, sources[0] if sources else None)
        return Encoding({stored.form: stored.array, **rate})
    joined, apart = shortest(audio, None), _apart(audio, sources)
    if sum(clip.array.nbytes for clip in apart) * MAX_OVERHEAD < joined.array.nbytes:
        arrays = {f"{n}/{clip.form}": clip.array for n, clip in enumerate(apart)}
        return Encoding({**arrays, **rate})
    starts = np.array(audio.clip_starts, np.int64)
    return Encoding({joined.form: joined.array, STARTS: starts, **rate})


def from_encoding(encoding: Encoding, audio_sha256: str) -> ReferenceAudio:
    """Read the audio back, of which the container has proved the bytes already.

    An upload that another version of its decoder reads slightly otherwise is still the
    speaker's clip: it is returned under the address that it is stored by.

    Raises:
        SourceCorruptError: No stored form, or samples of another audio.
        StorageError: It is whole, but nothing here decodes it.
    """
    try:
        rate, starts = int(encoding[RATE][0]), _starts(encoding)
        clips = _clips(encoding)
    except (LookupError, StopIteration, TypeError, ValueError) as exc:
        reason = f"holds no audio but {', '.join(encoding.arrays)}"
        raise SourceCorruptError(audio_sha256, reason) from exc
    try:
        audio = ReferenceAudio.joined(
            [_read(clip, rate, starts, audio_sha256) for clip in clips]
        )
    except (InvalidAudioError, ValueError) as exc:
        raise SourceCorruptError(audio_sha256, f"cannot be read: {exc}") from exc
    if any(clip.form == UPLOAD for clip in clips):
        return _as_it_decodes_now(audio, audio_sha256)
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


def _apart(audio: ReferenceAudio, sources: Sequence[bytes]) -> list[StoredClip]:
    clips = audio.clips()
    files = sources if len(sources) == len(clips) else [None] * len(clips)
    return [shortest(clip, file) for clip, file in zip(clips, files, strict=True)]


def _clips(encoding: Encoding) -> list[StoredClip]:
    """What is stored as one, or each clip. Raises: StopIteration: There is none."""
    if not any("/" in name for name in encoding.arrays):
        return [_stored(encoding.arrays, "")]
    if STARTS in encoding.arrays:
        raise ValueError("clips of their own begin nowhere in another")
    num_clips = len(encoding.arrays) - 1  # beside the rate
    return [_stored(encoding.arrays, f"{number}/") for number in range(num_clips)]


def _stored(arrays: Mapping[str, Array], prefix: str) -> StoredClip:
    form = next(form for form in FORMS if prefix + form in arrays)
    return StoredClip(form, arrays[prefix + form])


def _starts(encoding: Encoding) -> list[int]:
    stored = encoding.arrays.get(STARTS)
    starts = [0] if stored is None else [int(start) for start in stored]
    if UPLOAD in encoding.arrays and len(starts) > 1:
        raise ValueError("an upload is one clip")
    return starts


def _read(
    clip: StoredClip, sample_rate_hz: int, starts: Sequence[int], audio_sha256: str
) -> ReferenceAudio:
    try:
        return read(clip, sample_rate_hz, starts)
    except (InvalidAudioError, ValueError, MemoryError) as exc:
        causes = exc, exc.__cause__
        # A machine that has no memory for it must not take it from those that have.
        has_no_memory = any(isinstance(cause, MemoryError) for cause in causes)
        if clip.form != UPLOAD and not has_no_memory:
            raise
        raise StorageError(
            f"The stored audio {audio_sha256} is whole, but cannot be decoded here, "
            f"with this version of libsndfile or FFmpeg: {exc!r}"
        ) from exc


def _as_it_decodes_now(audio: ReferenceAudio, audio_sha256: str) -> ReferenceAudio:
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
    return serde.encode(key, to_encoding(decoded.audio, decoded.sources))


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
    return _undated(file.getvalue()), "audio/wav"


def _undated(wav: bytes) -> bytes:
    """Without the second in which libsndfile wrote it: equal samples, equal bytes."""
    at = wav.find(b"PEAK", 0, wav.index(b"data"))
    if at < 0:
        return wav
    at += _PEAK_WRITTEN_AT
    return wav[:at] + bytes(4) + wav[at + 4 :]


def _key(audio_sha256: str) -> EncodingKey:
    return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=AUDIO_KIND)
