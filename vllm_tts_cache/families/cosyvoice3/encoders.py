"""The three encodings of a clip: its speech tokens, its mel and its speaker's vector.

The networks are files of the checkpoint, and run on the CPU even where the talker has a
GPU: the tokenizer rounds to whole codes, and a GPU's sums would flip some of them. Only
the calling thread computes: the encode thread has a low priority, which threads of ONNX
Runtime's own would not have. And their number would change the result, since threads
share the terms of a sum.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import torch
from torch import Tensor

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.audio.speech_detector import one_thread_session
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.cosyvoice3 import features
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, MEL, SPEAKER, TOKENS
from vllm_tts_cache.families.cosyvoice3.positions import MEL_RATE_HZ, TOKENIZER_RATE_HZ
from vllm_tts_cache.families.networks.sinc_resample import RESAMPLER
from vllm_tts_cache.speaker.checkpoint import encoder_fingerprint
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.speaker.reference import Encoders, MemoryNeed
from vllm_tts_cache.store.encoding import Array, Encoding

# Raise it with any change here that changes what an encoder computes.
REVISION = 1

NUM_CODES = 6_561
SPEAKER_SIZE = 192

# ONNX Runtime's part of a fingerprint, beside the network's file.
VERSION: str = onnxruntime.__version__
NUM_THREADS = 1  # as `one_thread_session` has it
# The key of a tensor's ``external_data`` entry that names another file for its values,
# as Protocol Buffers encode it.
_EXTERNAL_DATA = re.compile(rb"\x0a\x08location\x12")

# Main memory that torch takes; docs/gpu.md has what the runtime takes beside that.
_NEED = MemoryNeed(fixed_bytes=1024**2, bytes_per_second=2 * 1024**2)


@dataclass(frozen=True, slots=True, eq=False)
class OnnxNetwork:
    """A network of one output; safe to call from any thread."""

    session: onnxruntime.InferenceSession

    def __call__(self, *inputs: Array) -> Array:
        """Compute the output for the inputs, in the order that the file has them.

        Raises:
            Exception: The runtime's own, of many kinds.
        """
        names = (given.name for given in self.session.get_inputs())
        fed = dict(zip(names, inputs, strict=True))
        return np.asarray(self.session.run(None, fed)[0])


def load_onnx(path: Path, *, num_inputs: int) -> OnnxNetwork:
    """Load a file.

    Raises: CheckpointError if the file cannot be read, has not ``num_inputs`` inputs,
        or keeps weights in another file.
    """
    try:
        with path.open("rb") as file:
            is_empty = not file.read(1)
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    if is_empty:
        raise CheckpointError(str(path), "it is empty")
    try:
        session = one_thread_session(path)
    except Exception as exc:  # ONNX Runtime's errors have no base of their own
        first_line = str(exc).partition("\n")[0]
        raise CheckpointError(str(path), f"not an ONNX file: {first_line}") from exc
    if (found := len(session.get_inputs())) != num_inputs:
        reason = f"it has {found} inputs, and this network must have {num_inputs}"
        raise CheckpointError(str(path), reason)
    # The fingerprint covers only the bytes of this file.
    if _EXTERNAL_DATA.search(_mapped(path).data):
        reason = (
            "it keeps weights in another file, which is not supported: save it as "
            "one (onnx.save(onnx.load(path), path))"
        )
        raise CheckpointError(str(path), reason)
    return OnnxNetwork(session)


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    # Copy on write: torch needs writable memory, though nothing writes to it.
    return np.memmap(path, dtype=np.uint8, mode="c")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClipEncoder:
    """Encodes a clip to one array, which has the encoder's name.

    ``compute`` makes the array, and may raise any exception of the runtime.
    """

    name: str
    fingerprint: str
    compute: Callable[[ReferenceAudio], Array]
    need: MemoryNeed = _NEED

    def encode(self, audio: ReferenceAudio) -> Encoding:
        """Encode one audio of at most 30 s.

        Raises: EncodeError if the audio is longer, or the network failed on it.
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


def load_reference_encoders(model_dir: Path, device: torch.device) -> Encoders:
    """Load the encoders of a checkpoint, as `Family.encoders_part` says.

    Raises: CheckpointError if a network's file cannot be read, or holds another
    network.
    """
    del device  # they compute on the CPU
    tokenizer = model_dir / "speech_tokenizer_v3.onnx"
    campplus = model_dir / "campplus.onnx"
    settings = _settings()
    encoders = (
        ClipEncoder(
            name=TOKENS,
            compute=partial(_speech_tokens, load_onnx(tokenizer, num_inputs=2)),
            fingerprint=_fingerprint("s3 tokenizer v3", settings[TOKENS], tokenizer),
        ),
        ClipEncoder(
            name=MEL,
            compute=lambda audio: features.mel_frames(audio).contiguous().numpy(),
            fingerprint=_fingerprint("24 khz mel", settings[MEL]),
        ),
        ClipEncoder(
            name=SPEAKER,
            compute=partial(_speaker_vector, load_onnx(campplus, num_inputs=1)),
            fingerprint=_fingerprint("campplus", settings[SPEAKER], campplus),
        ),
    )
    return {encoder.name: encoder for encoder in encoders}


def _speech_tokens(network: OnnxNetwork, audio: ReferenceAudio) -> Array:
    """Compute ``(num_tokens,)`` int16 codes."""
    frames = features.tokenizer_frames(audio)
    length = np.array([frames.shape[2]], dtype=np.int32)
    codes = network(frames.numpy(), length).reshape(-1)
    if codes.size == 0 or codes.min() < 0 or codes.max() >= NUM_CODES:
        raise EncodeError("the speech tokenizer returned values that are no codes")
    return codes.astype(np.int16)


def _speaker_vector(network: OnnxNetwork, audio: ReferenceAudio) -> Array:
    """Compute a ``(192,)`` float32 vector."""
    vector = network(features.speaker_frames(audio).numpy()).reshape(-1)
    if vector.shape != (SPEAKER_SIZE,) or not np.isfinite(vector).all():
        raise EncodeError(f"the speaker network gave {vector.shape}, not a vector")
    return vector.astype(np.float32)


def _fingerprint(
    network: str, settings: dict[str, Any], file: Path | None = None
) -> str:
    """Return the fingerprint of a network in a file, or of arithmetic without one."""
    weights: dict[str, Tensor] = {}
    if file is not None:
        weights[file.name] = torch.from_numpy(_mapped(file))
        settings = settings | {
            "onnxruntime": VERSION,
            "provider": "CPUExecutionProvider",
            "num_threads": NUM_THREADS,
            "optimization": "all",  # the runtime's default
        }
    return encoder_fingerprint(network, REVISION, RESAMPLER, weights, settings)


def _settings() -> dict[str, dict[str, Any]]:
    return {
        TOKENS: {
            "sample_rate_hz": TOKENIZER_RATE_HZ,
            "num_fft": features.TOKENIZER_FFT,
            "hop": features.TOKENIZER_HOP,
            "num_mels": features.TOKENIZER_MELS,
            "range": features.TOKENIZER_RANGE,
        },
        # Kaldi's filter banks are torchaudio's, with its defaults.
        SPEAKER: {
            "sample_rate_hz": TOKENIZER_RATE_HZ,
            "kaldi_mels": features.SPEAKER_MELS,
            "dither": 0,
        },
        MEL: {
            "sample_rate_hz": MEL_RATE_HZ,
            "num_fft": features.MEL_FFT,
            "hop": features.MEL_HOP,
            "num_mels": features.MEL_BINS,
            "floor": features.MEL_FLOOR,
            "epsilon": features.MEL_EPSILON,
        },
    }
