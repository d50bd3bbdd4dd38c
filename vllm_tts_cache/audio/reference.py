"""The value that reference encoders read, and its content address."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Another hash of the same bytes must never be taken for this one.
_DOMAIN = b"vllm-tts-cache/reference-audio/v1\0"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReferenceAudio:
    """Decoded mono audio at its own rate; build it with :meth:`of`.

    Attributes:
        samples: ``(num_samples,)`` float32, read-only, finite, full scale 1.0.
        sample_rate_hz: The rate the clip came with; nothing is resampled here.
        audio_sha256: Content address over rate and samples, in lowercase hex: the
            same clip as WAV, FLAC or base64 is one audio.
    """

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int
    audio_sha256: str

    @classmethod
    def of(
        cls, samples: npt.NDArray[np.float32], sample_rate_hz: int
    ) -> "ReferenceAudio":
        """Copy, freeze and address the samples.

        Raises:
            ValueError: Not a non-empty finite 1-D float32 array, or a rate that is
                not positive.
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
        # Adding zero copies, and turns -0.0 into 0.0: decoders differ in that sign,
        # and it must not give one clip two identities.
        owned = samples + np.float32(0.0)
        owned.flags.writeable = False
        return cls(
            samples=owned,
            sample_rate_hz=sample_rate_hz,
            audio_sha256=_address(owned, sample_rate_hz),
        )

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        return self.samples.size

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.num_samples / self.sample_rate_hz


def _address(samples: npt.NDArray[np.float32], sample_rate_hz: int) -> str:
    digest = hashlib.sha256(_DOMAIN)
    digest.update(sample_rate_hz.to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(samples, dtype="<f4").data)
    return digest.hexdigest()
