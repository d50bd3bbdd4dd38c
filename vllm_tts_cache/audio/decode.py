"""Decodes, downmixes and checks reference audio.

Safe in any thread. A clip takes up to a second of CPU, so keep it off an event loop. No
clip is trimmed, normalised or resampled: the official packages encode what the decoder
gives, downmixed by the mean over channels in float32. There are two exceptions: of two
channels that cancel each other only the first is taken, with a warning, and the padding
of a lossy codec is cut off a clip of the greatest length.

The *active level* is the RMS that at least 0.2 s of the clip reach: of frames of 20 ms,
each without its mean, the tenth loudest. So a constant offset is silence, and so are a
few clicks; a short word in a long pause is not.
"""

import base64
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import av
import numpy as np
import numpy.typing as npt
from av.audio.plane import AudioPlane

from vllm_tts_cache.audio.containers import MAX_PADDING_SAMPLES, ClipFile
from vllm_tts_cache.audio.reference import MAX_CLIPS, ReferenceAudio
from vllm_tts_cache.errors import InvalidAudioError

CLIP_MAX_BYTES = 10 * 1024 * 1024  # of a clip's file
_MIN_SECONDS, _MAX_SECONDS = 1.0, 30.0
_MIN_RATE_HZ, _MAX_RATE_HZ = 8_000, 192_000
# Third-order ambisonics has 16; without a bound a few bytes of a codec can stand for
# hundreds of silent channels.
_MAX_CHANNELS = 16

SILENCE_DBFS = -60.0
LOW_LEVEL_DBFS = -40.0
# The largest 16-bit sample is 0.99997; a sine that only touches full scale stays
# above this for fewer than three samples at the usual rates.
FULL_SCALE = 0.9999
MAX_CLIPPED_SHARE = 1e-3
_FRAMES_PER_SECOND = 50
_NUM_ACTIVE_FRAMES = 10  # 0.2 s
_FLOOR_POWER = 1e-20  # -200 dBFS stands for digital silence

# Clients write any media type, or none; browsers call an .mp4 or a .webm video, and put
# codecs with a comma between them behind it.
_DATA_URL_HEAD = re.compile(r"data:.{0,240}?;\s*base64\s*,", re.I | re.S)
# A share of the power that two unrelated channels would leave in their mean.
_CANCELLED_SHARE = 0.02
_BLOCK_SAMPLES = 1 << 18  # over all channels; one more frame may be in a block
# FFmpeg's packed sample formats and their types.
_DTYPES = {"u8": "u1", "s16": "i2", "s32": "i4", "flt": "f4", "dbl": "f8"}

Samples = npt.NDArray[np.float32]
# ``(num_frames, num_channels)``, at least one frame, and their rate in Hz.
PcmBlock = tuple[Samples, int]


@dataclass(frozen=True, slots=True)
class AudioWarning:
    """What is wrong with a clip, and no reason to refuse it."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAudio:
    """A usable reference audio and its faults.

    Attributes:
        sources: The file that each clip was decoded from; empty if a clip has none.
        decodes_otherwise: Whether another version of the decoder made these samples:
            this version makes other ones of the upload.
    """

    audio: ReferenceAudio
    warnings: tuple[AudioWarning, ...]
    sources: tuple[bytes, ...] = ()
    decodes_otherwise: bool = False


def decode(data: bytes, max_bytes: int = CLIP_MAX_BYTES) -> DecodedAudio:
    """Decode a whole file; of one that breaks off what is there, with a warning.

    Raises: InvalidAudioError: Empty, too large, undecodable, too short, too long,
        silent, not finite, or a rate or channel count out of bounds. A clip that is too
        long is refused after 30 s are decoded, whatever its header says.
    """
    check_size(len(data), max_bytes)
    file = ClipFile(data)
    mixed = downmix(within_limits(blocks(file.frames())))
    samples, rate = mixed.samples, mixed.sample_rate_hz
    sources: tuple[bytes, ...] = (data,)
    if file.is_lossy and samples.size > _MAX_SECONDS * rate:
        samples = samples[: int(_MAX_SECONDS * rate)]
        sources = ()  # the file would decode to more samples than these
    _check_not_longer(samples.size, rate)
    _check_not_shorter(samples.size, rate)
    if not np.isfinite(samples).all():
        raise InvalidAudioError("it holds samples that are not finite (NaN, Inf).")
    warnings: list[AudioWarning] = []
    if file.loss is not None:
        message = f"Only {file.loss} can be heard: the file breaks off or is damaged; "
        warnings.append(AudioWarning("truncated", f"{message}send it whole."))
    if mixed.is_one_channel:
        message = "Its two channels cancel each other, as if one were turned over; "
        message += "only the first is used."
        warnings.append(AudioWarning("one_channel", message))
    level = active_level_dbfs(samples, rate)
    warnings += check_level(level, clipped_share(mixed.at_full_scale))
    return DecodedAudio(ReferenceAudio.of(samples, rate), tuple(warnings), sources)


def is_data_url(url: str) -> bool:
    """Tell whether the URL holds the audio itself."""
    return url[:5].lower() == "data:"


def decode_data_url(url: str) -> DecodedAudio:
    """Decode ``data:...;base64,...``, whatever media type it names.

    Raises: InvalidAudioError: As for :func:`decode`, or not a base64 data URL.
    """
    if (head := _DATA_URL_HEAD.match(url)) is None:
        raise InvalidAudioError("expected data:audio/...;base64,... as its URL.")
    # Four characters hold three bytes; the last two may be padding.
    check_size(max(0, (len(url) - head.end()) // 4 * 3 - 2))
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except ValueError as exc:
        raise InvalidAudioError(f"its base64 is not valid ({exc}).") from exc
    return decode(data)


def decode_path(path: Path) -> DecodedAudio:
    """Decode a file that the operator names; never pass what a client sent.

    Raises: InvalidAudioError: As for :func:`decode`, or the file cannot be read; the
        message names it.
    """
    with naming(str(path)):
        try:
            with path.open("rb") as file:
                # One byte more than allowed; a pipe without end is not read to its end.
                data = file.read(CLIP_MAX_BYTES + 1)
        except OSError as exc:
            raise InvalidAudioError(f"{exc.strerror or exc}.") from exc
        return decode(data)


def check_size(num_bytes: int, max_bytes: int = CLIP_MAX_BYTES) -> None:
    """Refuse an empty or too large file. Raises: InvalidAudioError."""
    if num_bytes == 0:
        raise InvalidAudioError("it is empty.")
    if num_bytes > max_bytes:
        raise InvalidAudioError(
            f"it has {num_bytes / 1024**2:.1f} MB; at most {max_bytes / 1024**2:g} MB "
            "are allowed."
        )


def _check_not_longer(num_samples: int, sample_rate_hz: int) -> None:
    if num_samples > _MAX_SECONDS * sample_rate_hz:
        raise InvalidAudioError(
            f"it is longer than {_MAX_SECONDS:g} s, which is the most."
        )


def _check_not_shorter(num_samples: int, sample_rate_hz: int) -> None:
    if num_samples < _MIN_SECONDS * sample_rate_hz:
        raise InvalidAudioError(
            f"it lasts {num_samples / sample_rate_hz:.2f} s; at least "
            f"{_MIN_SECONDS:g} s are needed."
        )


def active_level_dbfs(samples: Samples, sample_rate_hz: int) -> float:
    """The active level of ``(num_samples,)`` audio, in dB relative to full scale."""
    size = min(samples.size, sample_rate_hz // _FRAMES_PER_SECOND)
    frames = samples[: samples.size // size * size].reshape(-1, size)
    # float64: the square of a large float32 sample overflows.
    power = np.sort(np.var(frames, axis=1, dtype=np.float64))[::-1]
    return decibels(power[min(power.size, _NUM_ACTIVE_FRAMES) - 1])


def decibels(power: float) -> float:
    """Return a power in dB, above those of digital silence."""
    return float(10 * np.log10(max(power, _FLOOR_POWER)))


def clipped_share(at_full_scale: npt.NDArray[np.bool_]) -> float:
    """Share of samples that begin three in a row at full scale; a peak has fewer."""
    flat = at_full_scale[:-2] & at_full_scale[1:-1] & at_full_scale[2:]
    return float(np.count_nonzero(flat) / max(at_full_scale.size, 1))


def check_level(level_dbfs: float, clipped: float) -> tuple[AudioWarning, ...]:
    """Refuse silence; warn of a low level and of clipping.

    Raises: InvalidAudioError: The active level is below ``SILENCE_DBFS``.
    """
    if level_dbfs < SILENCE_DBFS:
        raise InvalidAudioError(
            f"it is silent: no 0.2 s of it reach {SILENCE_DBFS:g} dBFS (RMS of 20 ms "
            f"frames without their mean); the loudest reach {level_dbfs:.1f} dBFS."
        )
    warnings = []
    if level_dbfs < LOW_LEVEL_DBFS:
        message = f"the loudest 0.2 s reach only {level_dbfs:.1f} dBFS (RMS); record "
        message += f"above {LOW_LEVEL_DBFS:g} dBFS."
        warnings.append(AudioWarning("low_level", message))
    if clipped > MAX_CLIPPED_SHARE:
        message = f"{clipped:.2%} of the samples lie in flat tops at full scale; "
        warnings.append(AudioWarning("clipping", f"{message}record with less gain."))
    return tuple(warnings)


def blocks(frames: Iterator[av.AudioFrame]) -> Iterator[PcmBlock]:
    """Join frames into blocks: for single ones NumPy would take longer than FFmpeg."""
    # A FIFO for each sample format: one for several would mix up their channels.
    joined, form, num_samples = av.AudioFifo(), None, 0
    for frame in frames:
        num_channels = frame.layout.nb_channels
        frame_form = (frame.format.name, num_channels, frame.sample_rate)
        if frame_form != form:
            if num_samples:
                yield _block(joined)
            joined, form, num_samples = av.AudioFifo(), frame_form, 0
        frame.pts = None  # the FIFO would not join frames with a gap between times
        joined.write(frame)
        num_samples += frame.samples * num_channels
        if num_samples >= _BLOCK_SAMPLES:
            yield _block(joined)
            num_samples = 0
    if num_samples:
        yield _block(joined)


def _block(joined: av.AudioFifo) -> PcmBlock:
    frame = cast(av.AudioFrame, joined.read())
    num_channels, is_planar = frame.layout.nb_channels, frame.format.is_planar
    dtype = np.dtype(_DTYPES[frame.format.packed.name])
    count = frame.samples if is_planar else frame.samples * num_channels
    # Each plane by its number: PyAV's `planes`, and so its `to_ndarray`, reads behind
    # the end of a table of eight; a 7.1 clip then crashes the process.
    planes = [
        np.frombuffer(cast(bytes, AudioPlane(frame, index)), dtype, count)
        for index in range(num_channels if is_planar else 1)
    ]
    # A float64 sample may become Inf, which `decode` refuses.
    with np.errstate(over="ignore"):
        stacked = np.stack(planes) if len(planes) > 1 else planes[0][np.newaxis]
        samples = stacked.astype(np.float32)
    if dtype.kind == "u":
        samples -= 128
    if dtype.kind != "f":
        samples *= np.float32(2.0 ** (1 - 8 * dtype.itemsize))
    rows = samples.T if is_planar else samples.reshape(-1, num_channels)
    return rows, frame.sample_rate


def within_limits(blocks: Iterator[PcmBlock]) -> Iterator[PcmBlock]:
    """Pass blocks on, until the end or one block past the longest duration.

    A codec's padding does not count against that.

    Raises: InvalidAudioError: Too many samples or channels, or a rate out of bounds.
    """
    num_samples = 0
    for samples, rate in blocks:
        if not _MIN_RATE_HZ <= rate <= _MAX_RATE_HZ:
            raise InvalidAudioError(
                f"its sample rate is {rate} Hz; allowed are {_MIN_RATE_HZ} to "
                f"{_MAX_RATE_HZ} Hz."
            )
        if (num_channels := samples.shape[1]) > _MAX_CHANNELS:
            raise InvalidAudioError(
                f"it has {num_channels} channels; at most {_MAX_CHANNELS} are allowed."
            )
        num_samples += len(samples)
        _check_not_longer(num_samples - MAX_PADDING_SAMPLES, rate)
        yield samples, rate


@dataclass(frozen=True, slots=True, eq=False)
class Downmix:
    """One channel made of several.

    Attributes:
        samples: ``(num_samples,)``: the mean over channels, or the first of two that
            cancel each other (`is_one_channel`).
        at_full_scale: Whether any channel was at full scale, of the same shape.
    """

    samples: Samples
    at_full_scale: npt.NDArray[np.bool_]
    sample_rate_hz: int
    is_one_channel: bool


def downmix(blocks: Iterator[PcmBlock]) -> Downmix:
    """Mix block by block.

    Raises: InvalidAudioError: No samples, or of several rates.
    """
    mean: list[Samples] = []
    first: list[Samples] = []
    at_full_scale: list[npt.NDArray[np.bool_]] = []
    rate, are_stereo = None, True
    for samples, block_rate in blocks:
        if rate not in (None, block_rate):
            raise InvalidAudioError("its sample rate changes midway.")
        rate = block_rate
        # Finite samples may add up to Inf, which `decode` refuses.
        with np.errstate(over="ignore", invalid="ignore"):
            mean.append(_mean(samples))
            peak = functools.reduce(np.maximum, np.abs(samples).T)
            at_full_scale.append(peak >= FULL_SCALE)
        are_stereo = are_stereo and samples.shape[1] == 2
        if are_stereo:
            first.append(samples[:, 0].copy())
    if rate is None:
        raise InvalidAudioError("it holds no samples.")
    mixed, flat = np.concatenate(mean), np.concatenate(at_full_scale)
    if are_stereo and _cancel(left := np.concatenate(first), mixed):
        return Downmix(left, flat, rate, True)
    return Downmix(mixed, flat, rate, False)


def _mean(samples: Samples) -> Samples:
    """The mean over channels, rounded as by NumPy's, which takes ten times as long."""
    match samples.shape[1]:
        case 1:
            return samples[:, 0]
        case 2:
            total = samples[:, 0] + samples[:, 1]
            return np.multiply(total, np.float32(0.5), dtype=np.float32)
    return np.mean(samples, axis=-1)


def _cancel(left: Samples, mean: Samples) -> bool:
    """Tell whether two channels with this mean cancel each other, offsets aside.

    The mean of unrelated channels has a quarter of their power, of equal ones half.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.var(left), np.var(2 * mean - left)
        return bool(np.var(mean) < _CANCELLED_SHARE * sum(powers) / 4)


def name_of(index: int) -> str:
    """How messages name one of several clips: by its field of the form."""
    return f"audio_sample[{index}]"


def decode_clips(files: Sequence[bytes]) -> DecodedAudio:
    """Decode and join the clips of one voice, in the order of their transcripts.

    The limits hold for each clip, and the longest duration for all together.

    Raises: InvalidAudioError: A clip, which the message names, cannot be used, or the
        clips cannot be used together.
    """
    if len(files) == 1:
        return decode(files[0])
    if len(files) > MAX_CLIPS:
        number = f"it comes in {len(files)} clips"
        raise InvalidAudioError(f"{number}; at most {MAX_CLIPS} are allowed.")
    decoded: list[DecodedAudio] = []
    for index, data in enumerate(files):
        with naming(name_of(index)):
            decoded.append(decode(data))
    return join(decoded)


def join(decoded: Sequence[DecodedAudio]) -> DecodedAudio:
    """Join decoded clips.

    Raises: InvalidAudioError: The clips have several rates, or are too long together.
    """
    clips = [each.audio for each in decoded]
    rate = clips[0].sample_rate_hz
    for index, clip in enumerate(clips):
        if clip.sample_rate_hz != rate:
            raise InvalidAudioError(
                f"{name_of(index)} has a sample rate of {clip.sample_rate_hz} Hz, and "
                f"{name_of(0)} one of {rate} Hz; record or convert all clips of a "
                "voice at one rate."
            )
    seconds = sum(clip.seconds for clip in clips)
    if seconds > _MAX_SECONDS:
        raise InvalidAudioError(
            f"its {len(clips)} clips last {seconds:.1f} s together; at most "
            f"{_MAX_SECONDS:g} s are allowed."
        )
    warnings = tuple(
        replace(warning, message=f"{name_of(index)}: {warning.message}")
        for index, each in enumerate(decoded)
        for warning in each.warnings
    )
    sources = tuple(source for each in decoded for source in each.sources)
    sources = sources if len(sources) == len(decoded) else ()
    return DecodedAudio(ReferenceAudio.joined(clips), warnings, sources)


def cut(decoded: DecodedAudio, clip_starts: Sequence[int]) -> DecodedAudio:
    """Cut a joined audio where its clips begin, and check each as `decode` does.

    Raises:
        InvalidAudioError: A clip cannot be used.
        ValueError: ``clip_starts`` leave a clip empty, or are too many.
    """
    whole = decoded.audio
    audio = ReferenceAudio.of(whole.samples, whole.sample_rate_hz, clip_starts)
    for index, clip in enumerate(audio.clips()):
        with naming(name_of(index)):
            _check_not_shorter(clip.num_samples, clip.sample_rate_hz)
            check_level(active_level_dbfs(clip.samples, clip.sample_rate_hz), 0.0)
    return DecodedAudio(audio, decoded.warnings)


@contextmanager
def naming(clip: str) -> Iterator[None]:
    """Put the name of a clip before the reason of an error."""
    try:
        yield
    except InvalidAudioError as exc:
        raise InvalidAudioError(f"{clip}: {exc.reason}") from exc
