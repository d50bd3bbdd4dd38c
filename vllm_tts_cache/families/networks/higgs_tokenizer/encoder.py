"""The tokenizer as Higgs Audio's own code uses it: a clip is only resampled."""

from dataclasses import dataclass

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.networks.higgs_tokenizer import frames
from vllm_tts_cache.families.networks.higgs_tokenizer.sizes import TokenizerSizes
from vllm_tts_cache.families.networks.higgs_tokenizer.tokenizer import HiggsTokenizer
from vllm_tts_cache.families.networks.resample import resample
from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

CODEC = "codec"
# A clip is only resampled. Families with equal preparation share encodings.
PREPARATION: dict[str, int] = {}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HiggsEncoder:
    """Gives ``codes``: ``(num_frames, 8)`` int16, the coarsest first; not delayed."""

    tokenizer: HiggsTokenizer
    name: str = CODEC

    @property
    def fingerprint(self) -> str:
        """See `ReferenceEncoder`."""
        return self.tokenizer.fingerprint

    @property
    def need(self) -> MemoryNeed:
        """See `ReferenceEncoder`."""
        return self.tokenizer.need

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio. Raises: EncodeError if the network failed on this audio."""
        try:
            codes = self.tokenizer.codes(resample(audio, frames.SAMPLE_RATE_HZ))
        except (RuntimeError, ValueError) as exc:
            raise EncodeError(f"Higgs audio tokenizer: {exc}") from exc
        return Encoding({"codes": codes})


def check_sizes(sizes: TokenizerSizes, *, path: str) -> None:
    """Refuse a tokenizer that makes another number of frames of a clip than `frames`.

    The scheduler is told that number before the clip is encoded.

    Raises: CheckpointError.
    """
    found = (
        *(sizes.sample_rate, sizes.samples_per_frame),
        *(sizes.num_codebooks, sizes.codebook_size),
    )
    known = (
        *(frames.SAMPLE_RATE_HZ, frames.SAMPLES_PER_FRAME),
        *(frames.NUM_CODEBOOKS, frames.CODEBOOK_SIZE),
    )
    if found != known:
        described = "{} Hz, {} samples a frame and {} codebooks of {}"
        reason = f"voices are cloned at {described.format(*known)} only, and it has "
        raise CheckpointError(path, reason + described.format(*found))
