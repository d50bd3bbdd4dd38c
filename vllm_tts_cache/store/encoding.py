"""An encoding, the key that it is stored by, and its stored form.

That form is one safetensors file with a checksum and the key in it. Reference audio is
stored so as well, one clip or several, as named arrays. A clip has one of three exact
forms. Samples that were whole numbers become FLAC; those of a lossy decoder have no
shorter exact form than the upload.

- ``flac``: ``(num_bytes,)`` uint8, a mono FLAC file of 16 or 24 bits,
- ``samples``: ``(num_samples,)`` float32,
- ``upload``: ``(num_bytes,)`` uint8, the file that the client sent.

All carry ``sample_rate_hz``, ``(1,)`` int64. A clip is one array, called after its
form. Several clips of a voice are stored in the shorter of two ways:

- joined, as ``flac`` or ``samples``, with ``clip_starts``, ``(num_clips,)``
  int64, the first sample of each,
- each by itself in its own form, as ``0/upload``, ``1/flac`` and so on.
"""

import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from xxhash import xxh3_128

from vllm_tts_cache import errors
from vllm_tts_cache.audio.reference import AUDIO, ReferenceAudio
from vllm_tts_cache.errors import EncodingCorruptError
from vllm_tts_cache.logs import ThrottledLog

if TYPE_CHECKING:  # a stage without speakers loads this module, and needs no decoder
    from vllm_tts_cache.audio.decode import DecodedAudio

Array = npt.NDArray[np.generic]

ADDRESS = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedOn:
    """What computed an encoding; for people, and no part of its key.

    Chips and versions of torch round differently in the last bits, and an encoding is
    used wherever it was computed. This explains differences between two encodings.

    Attributes:
        device: Kind of device, in torch's words: ``cpu``, ``cuda``.
        device_name: The chip.
        torch_version: With its build: ``2.13.0+cpu``.
    """

    device: str
    device_name: str
    torch_version: str


class Encoding:
    """One encoder's named arrays for one audio; immutable, so it is safe to share.

    NumPy rather than torch, because a NumPy array can be made read-only: one
    caller that scales an embedding in place must not change every later answer.
    """

    __slots__ = ("arrays", "num_bytes", "origin")

    def __init__(self, arrays: Mapping[str, Array], origin: ComputedOn | None = None):
        if not arrays:
            raise ValueError("an encoding has at least one array")
        kept = dict(sorted(arrays.items()))
        for name, array in kept.items():
            # A view of bytes, as read from a file, cannot change and needs no copy.
            if not (isinstance(array.base, bytes) and array.flags.c_contiguous):
                # A view of a caller's writable buffer could still change later.
                kept[name] = np.array(array, order="C", copy=True)
                kept[name].flags.writeable = False
        self.arrays = MappingProxyType(kept)
        self.num_bytes = sum(array.nbytes for array in kept.values())
        self.origin = origin

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingKey:
    """Everything that changes an encoding's bytes, and nothing else.

    Attributes:
        audio_sha256: Content address of the reference audio (rate and samples).
        encoder_fingerprint: Hex digest over all that changes what the encoder
            computes: weights, dtype, rates, resampler, attention, our revision.
            ``AUDIO`` for the stored form of the audio itself.
    """

    audio_sha256: str
    encoder_fingerprint: str

    @property
    def digest(self) -> str:
        """Hex SHA-256 of both parts; for logs and checks inside files."""
        canonical = f"{self.audio_sha256}/{self.encoder_fingerprint}"
        return hashlib.sha256(canonical.encode()).hexdigest()


# safetensors' name of a dtype -> the same in NumPy. safetensors would also write
# bfloat16, which NumPy cannot read back.
_DTYPES = {
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "C64": np.dtype("<c8"),
    "BOOL": np.dtype(np.bool_),
}
_SIZE_BYTES = 8  # a safetensors file starts with its header's length
# The checksum comes first, so that it is found before anything is parsed.
_START = b'{"__metadata__":{"xxh3_128":"'
# Then comes the key.
_IDENTITY = '","audio_sha256":"{}","encoder_fingerprint":"{}"'
_DIGITS = slice(_SIZE_BYTES + len(_START), _SIZE_BYTES + len(_START) + 32)
_ORIGIN = tuple(field.name for field in fields(ComputedOn))


def encoding_to_bytes(key: EncodingKey, encoding: Encoding) -> bytes:
    """Serialize; equal encodings under one key give equal bytes.

    Raises: TypeError: An array's dtype cannot be stored.
    """
    arrays: dict[str, Array] = {}
    for name, array in encoding.arrays.items():
        little = array.dtype.newbyteorder("<")
        if little not in _DTYPES.values():
            raise TypeError(f"array {name!r} is {array.dtype}, which cannot be stored")
        arrays[name] = np.asarray(array, dtype=little, order="C")
    blob = save(arrays)
    end = _SIZE_BYTES + int.from_bytes(blob[:_SIZE_BYTES], "little")
    # safetensors writes metadata in the order of a hash map seeded per process, so
    # ours is put in front of the header that it wrote without metadata.
    identity = _IDENTITY.format(key.audio_sha256, key.encoder_fingerprint)
    header = _START + b"0" * 32 + identity.encode()
    if encoding.origin is not None:
        origin = json.dumps(asdict(encoding.origin), separators=(",", ":"))
        header += f",{origin[1:-1]}".encode()
    header = (header + b"}," + blob[_SIZE_BYTES + 1 : end]).rstrip()
    header = header.ljust(-(-len(header) // 8) * 8)  # readers map at multiples of 8
    filled = bytearray(
        len(header).to_bytes(_SIZE_BYTES, "little") + header + blob[end:]
    )
    filled[_DIGITS] = _checksum(filled)
    return bytes(filled)


def encoding_from_bytes(blob: bytes, key: EncodingKey) -> Encoding:
    """Verify and parse one stored encoding; its arrays are views of ``blob``.

    Raises: EncodingCorruptError: ``blob`` is no encoding, has another key, or a byte
        that differs from what was written.
    """
    if not blob.startswith(_START, _SIZE_BYTES):
        raise EncodingCorruptError(key.digest, "not an encoding")
    if blob[_DIGITS] != _checksum(blob):
        raise EncodingCorruptError(key.digest, "checksum mismatch")
    identity = _IDENTITY.format(key.audio_sha256, key.encoder_fingerprint).encode()
    if not blob.startswith(identity, _DIGITS.stop):
        raise EncodingCorruptError(key.digest, "stored under another key")
    end = _SIZE_BYTES + int.from_bytes(blob[:_SIZE_BYTES], "little")
    try:
        # ``,ORIGIN},TENSORS}`` or ``},TENSORS}`` follows the identity: a brace for each
        # comma makes two JSON objects of it.
        text = "{" + blob[_DIGITS.stop + len(identity) : end].decode().removeprefix(",")
        metadata, length = json.JSONDecoder().raw_decode(text)
        tensors = json.loads("{" + text[length + 1 :])
        arrays: dict[str, Array] = {}
        for name, tensor in tensors.items():
            dtype, shape = _DTYPES[tensor["dtype"]], tensor["shape"]
            start = end + tensor["data_offsets"][0]
            arrays[name] = np.ndarray(shape, dtype, blob, start)
        # Reference audio has no origin: no encoder computed it.
        origin = {name: str(metadata[name]) for name in _ORIGIN} if metadata else None
        return Encoding(arrays, ComputedOn(**origin) if origin else None)
    except (KeyError, TypeError, ValueError) as exc:
        raise EncodingCorruptError(key.digest, f"not an encoding: {exc}") from exc


def _checksum(blob: bytes | bytearray) -> bytes:
    """Return XXH3-128 in hex over all of the file but these digits.

    It detects disk errors, not tampering: a writer of the directory can write a right
    checksum as well. SHA-256 would take longer than the read.
    """
    view = memoryview(blob)
    digest = xxh3_128(view[: _DIGITS.start])
    digest.update(view[_DIGITS.stop :])
    return digest.hexdigest().encode()


# -------- reference audio

FLAC, SAMPLES, UPLOAD = "flac", "samples", "upload"
FORMS = (FLAC, SAMPLES, UPLOAD)

# FLAC or samples are preferred up to this many times the upload's size: they decode to
# the same samples with every version of every library, and hold no name, picture or
# place that the client's recorder wrote into the file.
MAX_OVERHEAD = 1.05
# Bits -> (dtype that libsndfile takes, number of bits to shift the samples up).
_GRIDS = {16: (np.int16, 0), 24: (np.int32, 8)}

# After the id, the size and the version of libsndfile's chunk of peaks: Unix seconds.
_PEAK_WRITTEN_AT = 12

RATE, STARTS = "sample_rate_hz", "clip_starts"

_log = ThrottledLog()


@dataclass(frozen=True, slots=True, eq=False)
class StoredClip:
    """One clip, or several that are joined, in one of the forms."""

    form: str
    array: Array


def _shortest(audio: ReferenceAudio, source: bytes | None) -> StoredClip:
    """Return the audio in the smallest exact form; takes tens of milliseconds.

    ``source`` is the file that the audio was decoded from, if there is one. The result
    is at most 5 % larger than that.
    """
    stored = StoredClip(SAMPLES, audio.samples)
    if (flac := _exact_flac(audio)) is not None and len(flac) < stored.array.nbytes:
        stored = StoredClip(FLAC, np.frombuffer(flac, np.uint8))
    if source is not None and len(source) * MAX_OVERHEAD < stored.array.nbytes:
        stored = StoredClip(UPLOAD, np.frombuffer(source, np.uint8))
    return stored


def _exact_flac(audio: ReferenceAudio) -> bytes | None:
    """Return a FLAC file that decodes to the same samples, None if there is none."""
    import soundfile

    for bits in _GRIDS:
        numbers = _on_grid(audio.samples, bits)
        if numbers is None:
            continue
        file, subtype = io.BytesIO(), f"PCM_{bits}"
        try:
            soundfile.write(file, numbers, audio.sample_rate_hz, subtype, format="FLAC")
            # Decoded again as a check: this becomes the only copy of a voice.
            file.seek(0)
            again, rate = soundfile.read(file, dtype=cast(Any, numbers.dtype.name))
        except (soundfile.SoundFileError, OverflowError, ValueError):
            return None  # a rate that FLAC does not have
        is_exact = rate == audio.sample_rate_hz and np.array_equal(again, numbers)
        return file.getvalue() if is_exact else None
    return None


def _on_grid(samples: npt.NDArray[np.float32], bits: int) -> npt.NDArray[Any] | None:
    """Return the samples as whole numbers of ``bits``; None if one is not whole."""
    full_scale = 2.0 ** (bits - 1)
    scaled = samples.astype(np.float64) * full_scale
    if scaled.min() < -full_scale or scaled.max() > full_scale - 1:
        return None
    if not np.array_equal(scaled, np.rint(scaled)):
        return None
    dtype, shift = _GRIDS[bits]
    return scaled.astype(dtype) << shift


def _decoded(data: bytes, clip_starts: Sequence[int]) -> ReferenceAudio:
    from vllm_tts_cache.audio.containers import ClipFile
    from vllm_tts_cache.audio.decode import blocks, downmix

    # It passed the limits when it was registered; today's may be narrower.
    mixed = downmix(blocks(ClipFile(data).frames()))
    return ReferenceAudio.of(mixed.samples, mixed.sample_rate_hz, clip_starts)


def audio_to_encoding(audio: ReferenceAudio, sources: Sequence[bytes] = ()) -> Encoding:
    """Return the audio in the smallest exact way of storing it.

    ``sources`` are the files that the clips were decoded from; empty if a clip has
    none. The result is at most 5 % and some hundred bytes of header larger than those.
    It takes tens of milliseconds, so keep it off an event loop.
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


def audio_from_encoding(encoding: Encoding, audio_sha256: str) -> ReferenceAudio:
    """Decode the audio of an encoding whose checksum has been verified.

    If another version of its decoder reads an upload differently, that is still the
    speaker's clip: it is returned under the address that it is stored by.

    Raises:
        SourceCorruptError: The encoding has no form of audio, or another audio's.
        StorageError: The audio is whole, but this machine cannot decode it.
    """
    try:
        rate = int(encoding.arrays[RATE][0])
        starts, clips = _clips(encoding.arrays)
    except (LookupError, StopIteration, TypeError, ValueError) as exc:
        reason = f"holds only the arrays {', '.join(encoding.arrays)}"
        raise errors.SourceCorruptError(audio_sha256, reason) from exc
    try:
        audio = ReferenceAudio.joined(
            [_read(clip, rate, starts, audio_sha256) for clip in clips]
        )
    except (errors.InvalidAudioError, ValueError) as exc:
        raise errors.SourceCorruptError(audio_sha256, f"cannot be read: {exc}") from exc
    if audio.audio_sha256 == audio_sha256:
        return audio
    if not any(clip.form == UPLOAD for clip in clips):
        reason = f"holds the audio {audio.audio_sha256} by its samples"
        raise errors.SourceCorruptError(audio_sha256, reason)
    _log.warn_of(
        "an upload decodes otherwise",
        "The stored upload of audio %s decodes to other samples than when it was "
        "registered; another version of its decoder is installed. The new samples "
        "are used.",
        audio_sha256,
    )
    return dataclasses.replace(audio, audio_sha256=audio_sha256)


def _clips(arrays: Mapping[str, Array]) -> tuple[list[int], list[StoredClip]]:
    """Return the first sample of each joined clip, and the stored clips.

    Raises: StopIteration: A form is missing.
    """
    starts = [int(start) for start in arrays.get(STARTS, [0])]
    if UPLOAD in arrays and len(starts) > 1:
        raise ValueError("an upload is one clip")
    prefixes = [""]
    if any("/" in name for name in arrays):
        if STARTS in arrays:
            raise ValueError("clips that are stored apart have no clip_starts")
        num_clips = len(arrays) - 1  # beside the rate
        prefixes = [f"{number}/" for number in range(num_clips)]
    forms = [next(f for f in FORMS if prefix + f in arrays) for prefix in prefixes]
    return starts, [
        StoredClip(form, arrays[prefix + form])
        for prefix, form in zip(prefixes, forms, strict=True)
    ]


def _read(
    clip: StoredClip, sample_rate_hz: int, starts: Sequence[int], audio_sha256: str
) -> ReferenceAudio:
    """Decode a clip; ``sample_rate_hz`` is for samples, a file has its own rate."""
    try:
        if clip.form == SAMPLES:
            samples = cast("npt.NDArray[np.float32]", clip.array)
            return ReferenceAudio.of(samples, sample_rate_hz, starts)
        return _decoded(clip.array.tobytes(), starts)
    except (errors.InvalidAudioError, ValueError, MemoryError) as exc:
        # Too little memory here must not mark the audio corrupt for other machines.
        causes = exc, exc.__cause__
        has_no_memory = any(isinstance(cause, MemoryError) for cause in causes)
        if clip.form != UPLOAD and not has_no_memory:
            raise
        raise errors.StorageError(
            f"The stored audio {audio_sha256} is whole, but cannot be decoded here, "
            f"with this version of FFmpeg: {exc!r}"
        ) from exc


def audio_to_bytes(decoded: "DecodedAudio") -> bytes:
    """Return the whole file; takes up to a second of CPU."""
    audio = decoded.audio
    key = EncodingKey(audio_sha256=audio.audio_sha256, encoder_fingerprint=AUDIO)
    if not decoded.decodes_otherwise:
        return encoding_to_bytes(key, audio_to_encoding(audio, decoded.sources))
    # Only an upload may be read as an audio that has another address than its samples.
    wavs = [np.frombuffer(_wav(clip), np.uint8) for clip in audio.clips()]
    arrays = {f"{number}/{UPLOAD}": wav for number, wav in enumerate(wavs)}
    if len(wavs) == 1:
        arrays = {UPLOAD: wavs[0]}
    rate = np.array([audio.sample_rate_hz], np.int64)
    return encoding_to_bytes(key, Encoding({**arrays, RATE: rate}))


def audio_from_bytes(blob: bytes, key: EncodingKey) -> ReferenceAudio:
    """Verify and decode a stored file.

    Raises: SourceCorruptError: The bytes are no stored file, or another audio's.
    """
    try:
        encoding = encoding_from_bytes(blob, key)
    except errors.EncodingCorruptError as exc:
        raise errors.SourceCorruptError(key.audio_sha256, exc.reason) from exc
    return audio_from_encoding(encoding, key.audio_sha256)


def audio_to_client(blob: bytes, key: EncodingKey) -> tuple[bytes, str]:
    """Return a FLAC or WAV file with the same samples, and its media type.

    The upload itself is never returned: its format and other content are unchecked.

    Raises: SourceCorruptError: The bytes are no stored file, or another audio's.
    """
    audio = audio_from_bytes(blob, key)
    encoding = encoding_from_bytes(blob, key)
    if FLAC in encoding.arrays:
        return encoding[FLAC].tobytes(), "audio/flac"
    return _wav(audio), "audio/wav"


def _wav(audio: ReferenceAudio) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, audio.samples, audio.sample_rate_hz, "FLOAT", format="WAV")
    wav = bytearray(file.getvalue())
    # libsndfile writes the time into it; zeros give equal samples equal bytes.
    if (at := wav.find(b"PEAK", 0, wav.index(b"data"))) >= 0:
        at += _PEAK_WRITTEN_AT
        wav[at : at + 4] = bytes(4)
    return bytes(wav)


def check(data: bytes, key: EncodingKey) -> None:
    """Verify that bytes are the file of this key.

    Raises: SourceCorruptError, EncodingCorruptError.
    """
    if key.encoder_fingerprint == AUDIO:
        audio_from_bytes(data, key)
    else:
        encoding_from_bytes(data, key)


def named(artifact: str) -> str:
    """Return what messages call an artifact."""
    return "audio" if artifact == AUDIO else f"encoding by {artifact[:16]}"
