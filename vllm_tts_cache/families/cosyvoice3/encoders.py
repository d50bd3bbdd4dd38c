"""The three encodings of a clip: its speech tokens, its mel and its speaker's vector.

Networks are the checkpoint's own files, on the CPU whatever the talker runs on: the
tokenizer rounds to whole codes, and a GPU's sums would flip some of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.cosyvoice3 import features
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, MEL, SPEAKER, TOKENS
from vllm_tts_cache.families.cosyvoice3.positions import MEL_RATE_HZ, TOKENIZER_RATE_HZ
from vllm_tts_cache.families.networks.onnx import (
    OnnxNetwork,
    file_bytes,
    load_onnx,
    runtime_settings,
)
from vllm_tts_cache.families.networks.sinc_resample import RESAMPLER
from vllm_tts_cache.speaker.checkpoint import encoder_fingerprint
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.speaker.reference import MemoryNeed, ReferenceEncoder
from vllm_tts_cache.store.encoding import Array, Encoding

# Raise it with any change here that changes what an encoder computes.
REVISION = 1

NUM_CODES = 6_561
SPEAKER_SIZE = 192

# Of main memory: what torch takes; docs/gpu.md has what the runtime takes beside that.
_NEED = MemoryNeed(fixed_bytes=1024**2, bytes_per_second=2 * 1024**2)

Compute = Callable[[ReferenceAudio], Array]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClipEncoder:
    """Gives one array of its own name.

    Attributes:
        compute: Makes the array; raises whatever the runtime raises.
    """

    name: str
    fingerprint: str
    compute: Compute
    need: MemoryNeed = _NEED

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio of at most 30 s.

        Raises:
            EncodeError: It is longer, or the network failed on it.
        """
        if audio.seconds > FAMILY.limits.max_seconds:
            problem = FAMILY.limits.problem(audio.num_samples, audio.sample_rate_hz)
            raise EncodeError(f"CosyVoice3 {self.name}: {problem}")
        try:
            with exact_float32(features.CPU):
                array = self.compute(audio)
        except EncodeError:
            raise
        except Exception as exc:  # ONNX Runtime's errors have no base of their own
            raise EncodeError(f"CosyVoice3 {self.name}: {exc}") from exc
        return Encoding({self.name: array})


def load_reference_encoders(
    model_dir: Path,
    device: torch.device,  # noqa: ARG001  they compute on the CPU
) -> dict[str, ReferenceEncoder]:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises:
        CheckpointError: A network's file cannot be read, or is none.
    """
    tokenizer = model_dir / "speech_tokenizer_v3.onnx"
    campplus = model_dir / "campplus.onnx"
    encoders = (
        ClipEncoder(
            name=TOKENS,
            compute=_speech_tokens(load_onnx(tokenizer, num_inputs=2)),
            fingerprint=_fingerprint(
                "s3 tokenizer v3",
                file_bytes(tokenizer),
                runtime_settings() | _tokenizer_settings(),
            ),
        ),
        ClipEncoder(
            name=MEL,
            compute=lambda audio: features.mel_frames(audio).contiguous().numpy(),
            fingerprint=_fingerprint("24 khz mel", {}, _mel_settings()),
        ),
        ClipEncoder(
            name=SPEAKER,
            compute=_speaker_vector(load_onnx(campplus, num_inputs=1)),
            fingerprint=_fingerprint(
                "campplus",
                file_bytes(campplus),
                runtime_settings() | _speaker_settings(),
            ),
        ),
    )
    return {encoder.name: encoder for encoder in encoders}


def _speech_tokens(network: OnnxNetwork) -> Compute:
    """``(num_tokens,)`` int16, each a code."""

    def compute(audio: ReferenceAudio) -> Array:
        frames = features.tokenizer_frames(audio)
        length = np.array([frames.shape[2]], dtype=np.int32)
        codes = network(frames.numpy(), length).reshape(-1)
        if codes.size == 0 or codes.min() < 0 or codes.max() >= NUM_CODES:
            raise EncodeError("the speech tokenizer gave what are no codes")
        return codes.astype(np.int16)

    return compute


def _speaker_vector(network: OnnxNetwork) -> Compute:
    """``(192,)`` float32."""

    def compute(audio: ReferenceAudio) -> Array:
        vector = network(features.speaker_frames(audio).numpy()).reshape(-1)
        if vector.shape != (SPEAKER_SIZE,) or not np.isfinite(vector).all():
            raise EncodeError(f"the speaker network gave {vector.shape}, not a vector")
        return vector.astype(np.float32)

    return compute


def _fingerprint(
    network: str, weights: dict[str, Tensor], settings: dict[str, Any]
) -> str:
    return encoder_fingerprint(
        network=network,
        revision=REVISION,
        resampler=RESAMPLER,
        weights=weights,
        settings=settings,
    )


def _tokenizer_settings() -> dict[str, Any]:
    return {
        "sample_rate_hz": TOKENIZER_RATE_HZ,
        "num_fft": features.TOKENIZER_FFT,
        "hop": features.TOKENIZER_HOP,
        "num_mels": features.TOKENIZER_MELS,
        "range": features.TOKENIZER_RANGE,
    }


def _speaker_settings() -> dict[str, Any]:
    # Kaldi's filter banks are torchaudio's, with its defaults.
    return {
        "sample_rate_hz": TOKENIZER_RATE_HZ,
        "kaldi_mels": features.SPEAKER_MELS,
        "dither": 0,
    }


def _mel_settings() -> dict[str, Any]:
    return {
        "sample_rate_hz": MEL_RATE_HZ,
        "num_fft": features.MEL_FFT,
        "hop": features.MEL_HOP,
        "num_mels": features.MEL_BINS,
        "floor": features.MEL_FLOOR,
        "epsilon": features.MEL_EPSILON,
    }
