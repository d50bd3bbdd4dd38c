"""Several clips of one speaker: each is decoded and checked by itself, then joined."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from vllm_tts_cache.audio.decode import DecodedAudio, decode
from vllm_tts_cache.audio.limits import (
    DEFAULT_LIMITS,
    AudioLimits,
    active_level_dbfs,
    check_level,
)
from vllm_tts_cache.audio.reference import MAX_CLIPS, ReferenceAudio
from vllm_tts_cache.errors import InvalidAudioError


def name_of(index: int) -> str:
    """What messages call one of several clips: as the form's field, from 0 on."""
    return f"audio_sample[{index}]"


def decode_clips(
    files: Sequence[bytes], limits: AudioLimits = DEFAULT_LIMITS
) -> DecodedAudio:
    """Decode the clips of one voice; of one clip the same as `decode`.

    Args:
        files: In the order of their transcripts.
        limits: Of each clip; the longest that one may be, all together may be.

    Raises:
        InvalidAudioError: One cannot be used, which the message names, or not all
            together.
    """
    if len(files) == 1:
        return decode(files[0], limits)
    if len(files) > MAX_CLIPS:
        reason = f"it comes in {len(files)} clips; at most {MAX_CLIPS} are allowed."
        raise InvalidAudioError(reason)
    decoded: list[DecodedAudio] = []
    for index, data in enumerate(files):
        with naming(index):
            decoded.append(decode(data, limits))
    return join(decoded, limits)


def join(
    decoded: Sequence[DecodedAudio], limits: AudioLimits = DEFAULT_LIMITS
) -> DecodedAudio:
    """Put decoded clips behind each other.

    Raises:
        InvalidAudioError: They have several rates, or are too long together.
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
    if seconds > limits.max_seconds:
        raise InvalidAudioError(
            f"its {len(clips)} clips last {seconds:.1f} s together; at most "
            f"{limits.max_seconds:g} s are allowed."
        )
    warnings = tuple(
        replace(warning, message=f"{name_of(index)}: {warning.message}")
        for index, each in enumerate(decoded)
        for warning in each.warnings
    )
    sources = tuple(source for each in decoded for source in each.sources)
    if len(sources) < len(decoded):
        sources = ()
    return DecodedAudio(ReferenceAudio.joined(clips), warnings, sources)


def cut(
    decoded: DecodedAudio,
    clip_starts: Sequence[int],
    limits: AudioLimits = DEFAULT_LIMITS,
) -> DecodedAudio:
    """Cut a joined audio where its clips begin; each must be one that `decode` takes.

    Raises:
        InvalidAudioError: A clip cannot be used.
        ValueError: There can be no clips that begin there.
    """
    whole = decoded.audio
    audio = ReferenceAudio.of(whole.samples, whole.sample_rate_hz, clip_starts)
    for index, clip in enumerate(audio.clips()):
        with naming(index):
            limits.check_not_shorter(clip.num_samples, clip.sample_rate_hz)
            check_level(active_level_dbfs(clip.samples, clip.sample_rate_hz), 0.0)
    return DecodedAudio(audio, decoded.warnings)


@contextmanager
def naming(index: int) -> Iterator[None]:
    """Name one of several clips in what is said of it."""
    try:
        yield
    except InvalidAudioError as exc:
        raise InvalidAudioError(f"{name_of(index)}: {exc.reason}") from exc
