"""The stored file of reference audio: one clip or several, as named arrays.

A clip is stored in one of three forms, each of them exact. What came as whole numbers
goes back to FLAC; what a lossy decoder made has no shorter exact form than the upload.

- ``flac``: ``(num_bytes,)`` uint8, a mono FLAC file of 16 or 24 bits,
- ``samples``: ``(num_samples,)`` float32,
- ``upload``: ``(num_bytes,)`` uint8, the file that the client sent.

All carry ``sample_rate_hz``, ``(1,)`` int64. A clip is one array, called after its
form. Several clips of a voice are stored in the shorter way of two:

- behind each other, as ``flac`` or ``samples``, with ``clip_starts``, ``(num_clips,)``
  int64: at which samples they begin,
- each by itself in its own form, as ``0/upload``, ``1/flac`` and so on.
"""

import dataclasses
import io
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import soundfile

from vllm_tts_cache.audio.containers import ClipFile
from vllm_tts_cache.audio.decode import DecodedAudio, blocks, downmix
from vllm_tts_cache.audio.limits import AudioLimits
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.records import AUDIO_KIND
from vllm_tts_cache.errors import (
    EncodingCorruptError,
    InvalidAudioError,
    SourceCorruptError,
    StorageError,
)
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store.encoding import (
    Array,
    Encoding,
    EncodingKey,
    encoding_from_bytes,
    encoding_to_bytes,
)

FLAC, SAMPLES, UPLOAD = "flac", "samples", "upload"
FORMS = (FLAC, SAMPLES, UPLOAD)

# Our own form may be this much larger than the upload and is taken still: it decodes
# to the same samples with every version of every library, and holds no name, picture
# or place that the client's recorder wrote into the file.
MAX_OVERHEAD = 1.05
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

# After the id, the size and the version of libsndfile's chunk of peaks: Unix seconds.
_PEAK_WRITTEN_AT = 12

RATE, STARTS = "sample_rate_hz", "clip_starts"

_log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))


@dataclass(frozen=True, slots=True, eq=False)
class StoredClip:
    """A clip, or several behind each other, in one of the forms."""

    form: str
    array: Array


def _shortest(audio: ReferenceAudio, source: bytes | None) -> StoredClip:
    """Choose the form that is no larger than need be.

    ``source`` is the one file that the audio was decoded from, if there is one. It is
    about as large as that at most (5 % more). It takes some tens of milliseconds.
    """
    stored = StoredClip(SAMPLES, audio.samples)
    if (flac := _exact_flac(audio)) is not None and len(flac) < stored.array.nbytes:
        stored = StoredClip(FLAC, np.frombuffer(flac, np.uint8))
    if source is not None and len(source) * MAX_OVERHEAD < stored.array.nbytes:
        stored = StoredClip(UPLOAD, np.frombuffer(source, np.uint8))
    return stored


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


def _decoded(data: bytes, clip_starts: Sequence[int]) -> ReferenceAudio:
    mixed = downmix(blocks(ClipFile(data).frames()), _NO_LIMITS)
    return ReferenceAudio.of(mixed.samples, mixed.sample_rate_hz, clip_starts)


def to_encoding(audio: ReferenceAudio, sources: Sequence[bytes] = ()) -> Encoding:
    """Choose how the audio is stored: exact, and no larger than need be.

    ``sources`` are the files that the clips were decoded from; none if one never was
    one. It is about as large as those at most (5 % and a header of some hundred bytes
    more). It takes some tens of milliseconds, so keep it off an event loop.
    """
    rate = {RATE: np.array([audio.sample_rate_hz], np.int64)}
    if len(audio.clip_starts) == 1:
        stored = _shortest(audio, sources[0] if sources else None)
        return Encoding({stored.form: stored.array, **rate})
    clips = audio.clips()
    files = sources if len(sources) == len(clips) else [None] * len(clips)
    apart = [_shortest(clip, file) for clip, file in zip(clips, files, strict=True)]
    joined = _shortest(audio, None)
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
    if audio.audio_sha256 == audio_sha256:
        return audio
    if not any(clip.form == UPLOAD for clip in clips):
        reason = f"holds the audio {audio.audio_sha256} by its samples"
        raise SourceCorruptError(audio_sha256, reason)
    _log.warn_of(
        "an upload decodes otherwise",
        "The stored upload of audio %s decodes to other samples than when it was "
        "registered; another version of its decoder is installed. It is used as it "
        "decodes now.",
        audio_sha256,
    )
    return dataclasses.replace(audio, audio_sha256=audio_sha256)


def _clips(encoding: Encoding) -> list[StoredClip]:
    """What is stored as one, or each clip. Raises: StopIteration: There is none."""
    arrays = encoding.arrays
    prefixes = [""]
    if any("/" in name for name in arrays):
        if STARTS in arrays:
            raise ValueError("clips of their own begin nowhere in another")
        num_clips = len(arrays) - 1  # beside the rate
        prefixes = [f"{number}/" for number in range(num_clips)]
    forms = [next(f for f in FORMS if prefix + f in arrays) for prefix in prefixes]
    return [
        StoredClip(form, arrays[prefix + form])
        for prefix, form in zip(prefixes, forms, strict=True)
    ]


def _starts(encoding: Encoding) -> list[int]:
    stored = encoding.arrays.get(STARTS)
    starts = [0] if stored is None else [int(start) for start in stored]
    if UPLOAD in encoding.arrays and len(starts) > 1:
        raise ValueError("an upload is one clip")
    return starts


def _read(
    clip: StoredClip, sample_rate_hz: int, starts: Sequence[int], audio_sha256: str
) -> ReferenceAudio:
    """Read a clip back; samples have this rate, and a file says its own."""
    try:
        if clip.form == SAMPLES:
            samples = cast("npt.NDArray[np.float32]", clip.array)
            return ReferenceAudio.of(samples, sample_rate_hz, starts)
        return _decoded(clip.array.tobytes(), starts)
    except (InvalidAudioError, ValueError, MemoryError) as exc:
        # A machine that has no memory for it must not take it from those that have.
        causes = exc, exc.__cause__
        has_no_memory = any(isinstance(cause, MemoryError) for cause in causes)
        if clip.form != UPLOAD and not has_no_memory:
            raise
        raise StorageError(
            f"The stored audio {audio_sha256} is whole, but cannot be decoded here, "
            f"with this version of FFmpeg: {exc!r}"
        ) from exc


def to_bytes(decoded: DecodedAudio) -> bytes:
    """The whole file; it takes up to a second of CPU."""
    key = _key(decoded.audio.audio_sha256)
    return encoding_to_bytes(key, to_encoding(decoded.audio, decoded.sources))


def from_bytes(blob: bytes, audio_sha256: str) -> ReferenceAudio:
    """Verify and decode a stored file.

    Raises: SourceCorruptError: Not such a file, or of another audio.
    """
    try:
        encoding = encoding_from_bytes(blob, _key(audio_sha256))
    except EncodingCorruptError as exc:
        raise SourceCorruptError(audio_sha256, exc.reason) from exc
    return from_encoding(encoding, audio_sha256)


def to_client(blob: bytes, audio_sha256: str) -> tuple[bytes, str]:
    """A file that plays anywhere, with the same samples, and its media type.

    Never the upload as it came: what else is in it is not known, nor what it is.

    Raises: SourceCorruptError: Not a stored file, or of another audio.
    """
    audio = from_bytes(blob, audio_sha256)
    encoding = encoding_from_bytes(blob, _key(audio_sha256))
    if FLAC in encoding.arrays:
        return encoding[FLAC].tobytes(), "audio/flac"
    file = io.BytesIO()
    soundfile.write(file, audio.samples, audio.sample_rate_hz, "FLOAT", format="WAV")
    wav = bytearray(file.getvalue())
    # Without the second in which libsndfile wrote it: equal samples, equal bytes.
    if (at := wav.find(b"PEAK", 0, wav.index(b"data"))) >= 0:
        at += _PEAK_WRITTEN_AT
        wav[at : at + 4] = bytes(4)
    return bytes(wav), "audio/wav"


def _key(audio_sha256: str) -> EncodingKey:
    return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=AUDIO_KIND)


def check(data: bytes, audio_sha256: str, kind: str) -> None:
    """See that bytes are the file of this address and kind.

    Raises: SourceCorruptError, EncodingCorruptError.
    """
    if kind == AUDIO_KIND:
        from_bytes(data, audio_sha256)
    else:
        key = EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=kind)
        encoding_from_bytes(data, key)


def named(kind: str) -> str:
    """What a file of this kind is called in a message."""
    return "audio" if kind == AUDIO_KIND else f"encoding by {kind[:16]}"
