"""The audio that reference encoders read, and its content address."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# Begins what is hashed, so that no other hash of the same bytes equals an address.
_DOMAIN = b"vllm-tts-cache/reference-audio/v1\0"
_CLIPS_DOMAIN = b"vllm-tts-cache/reference-clips/v1\0"

# The most clips of one audio, in a form or a bundle; models take fewer.
MAX_CLIPS = 32

AUDIO = "audio"  # names the stored audio itself, beside its encodings


class Segment(StrEnum):
    """Audio that is registered, or came inline; each has its part of every budget."""

    REGISTERED = "registered"
    INLINE = "inline"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReferenceAudio:
    """Decoded mono audio at its own rate; build it with :meth:`of` or :meth:`joined`.

    Several clips of one speaker are one audio that is cut where they begin.

    Attributes:
        samples: ``(num_samples,)`` float32, read-only, finite, full scale 1.0.
        sample_rate_hz: The rate of the clip as it came.
        audio_sha256: Content address over rate and samples, in lowercase hex: the
            same clip as WAV, FLAC or base64 is one audio. With several clips it is over
            `clip_starts` as well.
        clip_starts: The first sample of each clip, in order; ``(0,)`` for one.
    """

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int
    audio_sha256: str
    clip_starts: tuple[int, ...] = (0,)

    @classmethod
    def of(
        cls,
        samples: npt.NDArray[np.float32],
        sample_rate_hz: int,
        clip_starts: Sequence[int] = (0,),
    ) -> "ReferenceAudio":
        """Copy, freeze and address the samples.

        Raises: ValueError: Not a non-empty finite 1-D float32 array, a rate that is not
            positive, or cuts that leave a clip empty or are too many.
        """
        if samples.ndim != 1 or samples.dtype != np.float32 or samples.size == 0:
            raise ValueError(
                "expected a non-empty 1-D float32 array, "
                f"got {samples.dtype} of shape {samples.shape}"
            )
        if sample_rate_hz <= 0:
            raise ValueError(f"the sample rate must be positive: {sample_rate_hz} Hz")
        if not np.isfinite(samples).all():
            raise ValueError("the samples are not all finite")
        starts, size = tuple(map(int, clip_starts)), samples.size
        if len(starts) > MAX_CLIPS:
            raise ValueError(f"{len(starts)} clips are more than {MAX_CLIPS}")
        if starts[:1] != (0,) or any(a >= b for a, b in pairwise((*starts, size))):
            raise ValueError(f"clips cannot begin at {list(starts)} of {size}")
        # Adding zero copies, and turns -0.0 into 0.0: decoders differ in that sign,
        # which must not give one clip two addresses.
        owned = samples + np.float32(0.0)
        owned.flags.writeable = False
        digest = hashlib.sha256(_DOMAIN if len(starts) == 1 else _CLIPS_DOMAIN)
        digest.update(sample_rate_hz.to_bytes(8, "little"))
        if len(starts) > 1:
            for number in (len(starts), *starts):
                digest.update(number.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(owned, dtype="<f4").data)
        return cls(
            samples=owned,
            sample_rate_hz=sample_rate_hz,
            audio_sha256=digest.hexdigest(),
            clip_starts=starts,
        )

    @classmethod
    def joined(cls, clips: Sequence["ReferenceAudio"]) -> "ReferenceAudio":
        """Join clips of one rate; return a single one as it is.

        Raises: ValueError: There are no clips or too many, or they have several rates.
        """
        if len(clips) == 1:
            return clips[0]
        rates = sorted({clip.sample_rate_hz for clip in clips})
        if len(rates) != 1:
            raise ValueError(f"clips of one sampling rate make an audio, not {rates}")
        ends = np.cumsum([0, *(clip.num_samples for clip in clips)]).tolist()
        samples = np.concatenate([clip.samples for clip in clips])
        return cls.of(samples, rates[0], ends[:-1])

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return self.samples.size

    @property
    def num_clips(self) -> int:
        """The number of clips."""
        return len(self.clip_starts)

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.num_samples / self.sample_rate_hz

    def clips(self) -> "tuple[ReferenceAudio, ...]":
        """Return each clip as an audio; an audio of one clip is its own."""
        if self.num_clips == 1:
            return (self,)
        ends = (*self.clip_starts, self.num_samples)
        return tuple(
            ReferenceAudio.of(self.samples[start:end], self.sample_rate_hz)
            for start, end in pairwise(ends)
        )
