"""OmniVoice's reference encoder: a clip to the codes that its prompt is made of."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.networks.higgs_tokenizer import tokenizer as higgs
from vllm_tts_cache.families.networks.higgs_tokenizer.encoder import HiggsEncoder
from vllm_tts_cache.families.networks.sinc_resample import FUNCTION_RESAMPLER
from vllm_tts_cache.families.omnivoice import preparation
from vllm_tts_cache.families.omnivoice.family import CODEC_ENCODER, TOKENIZER
from vllm_tts_cache.speaker.reference import Encoders, MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

# numpy's and torch's arrays of a clip, see docs/gpu.md.
_PREPARATION_BYTES_PER_SECOND = 2 * 1024**2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OmniVoiceEncoder(HiggsEncoder):
    """Gives ``codes``, ``(num_frames, 8)`` int16, and ``rms``, ``(1,)`` float32.

    The tokenizer's fingerprint covers the preparation, too.
    """

    name: str = CODEC_ENCODER

    @property
    def need(self) -> MemoryNeed:
        """The tokenizer's need; on a CPU the preparation's, if that is more.

        They run one after the other, and the preparation is always in main memory.
        """
        network = self.tokenizer.need
        if self.tokenizer.device.type != "cpu":
            return network
        per_second = max(network.bytes_per_second, _PREPARATION_BYTES_PER_SECOND)
        return MemoryNeed(fixed_bytes=network.fixed_bytes, bytes_per_second=per_second)

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio.

        Raises:
            EncodeError: Without its silence the clip has no whole frame, or the network
                failed on it.
        """
        clip = preparation.prepare(audio, self.tokenizer.sizes.samples_per_frame)
        if not clip.samples.size:
            raise EncodeError("without its silence nothing is left of the clip")
        try:
            codes = self.tokenizer.codes(clip.samples)
        except (RuntimeError, ValueError) as exc:
            raise EncodeError(f"audio tokenizer: {exc}") from exc
        return Encoding({"codes": codes, "rms": np.array([clip.rms], np.float32)})


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises:
        CheckpointError: It is not this tokenizer, not one of 24 kHz, or a tensor is
            missing or of another shape; the message names it.
    """
    directory = model_dir / TOKENIZER
    tokenizer = higgs.load_higgs_tokenizer(
        directory, device, FUNCTION_RESAMPLER, preparation.settings()
    )
    if (found_hz := tokenizer.sizes.sample_rate) != (known_hz := preparation.RATE_HZ):
        reason = f"voices are cloned at {known_hz} Hz only, and it has {found_hz} Hz"
        raise CheckpointError(str(directory / "config.json"), reason)
    return {CODEC_ENCODER: OmniVoiceEncoder(tokenizer=tokenizer)}
