"""OmniVoice's reference encoder: a clip to the codes that its prompt is made of."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.networks.higgs_tokenizer import encoder as higgs
from vllm_tts_cache.families.networks.sinc_resample import FUNCTION_RESAMPLER
from vllm_tts_cache.families.omnivoice import preparation
from vllm_tts_cache.families.omnivoice.family import CODEC_ENCODER, TOKENIZER
from vllm_tts_cache.speaker.checkpoint_dir import check_rates
from vllm_tts_cache.speaker.precision import encoding_exactly
from vllm_tts_cache.speaker.reference import Encoders, MemoryNeed
from vllm_tts_cache.store.encoding import Encoding

# numpy's and torch's arrays of a clip, see docs/gpu.md.
PREPARATION_BYTES_PER_SECOND = 2 * 1024**2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OmniVoiceEncoder(higgs.HiggsEncoder):
    """Gives ``codes``, ``(num_frames, 8)`` int16, and ``rms``, ``(1,)`` float32."""

    @property
    def need(self) -> MemoryNeed:
        """The network's need; on a CPU the preparation's, if that is more.

        They run one after the other, and the preparation is always in main memory.
        """
        network = higgs.network_need(self.sizes)
        if self.device.type != "cpu":
            return network
        per_second = max(network.bytes_per_second, PREPARATION_BYTES_PER_SECOND)
        return MemoryNeed(fixed_bytes=network.fixed_bytes, bytes_per_second=per_second)

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio.

        Raises: EncodeError: Without its silence the clip has no whole frame, or the
        network failed on it.
        """
        clip = preparation.prepare(audio, self.sizes.samples_per_frame)
        if not clip.samples.size:
            raise EncodeError("without its silence nothing is left of the clip")
        with encoding_exactly(self.device, "audio tokenizer"):
            codes = self.codes(clip.samples)
        return Encoding({"codes": codes, "rms": np.array([clip.rms], np.float32)})


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoder of a checkpoint, as `Family.encoders_part` says.

    Raises: CheckpointError if it has another tokenizer, not one of 24 kHz, or a tensor
    does not fit.
    """
    directory, settings = model_dir / TOKENIZER, preparation.settings()
    encoder = higgs.load_higgs_encoder(
        directory, device, FUNCTION_RESAMPLER, settings, kind=OmniVoiceEncoder
    )
    found, known = (encoder.sizes.sample_rate,), (preparation.RATE_HZ,)
    check_rates(directory / "config.json", "{} Hz", found=found, known=known)
    return {CODEC_ENCODER: encoder}
