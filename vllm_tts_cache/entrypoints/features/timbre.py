"""Tells speakers apart by the trained encoder in the package Resemblyzer.

It is the d-vector of "Generalized End-to-End Loss for Speaker Verification" (Wan et
al., 2018): three LSTM layers over 40 mel bands. The package is never imported: it needs
others that do not install. Its file of weights is read.
"""

import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soxr
import torch
from torch import nn
from transformers.audio_utils import mel_filter_bank

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.audio.speech_detector import find_speech, load_network
from vllm_tts_cache.errors import ConfigError

_PACKAGE, _WEIGHTS = "Resemblyzer", "pretrained.pt"

_RATE_HZ = 16_000
_WINDOW, _HOP = 400, 160
_NUM_MELS, _SIZE = 40, 256
# The network hears 1.6 s at a time, about half of which it has heard before.
_FRAMES, _STEP = 160, 77
_LEVEL_DBFS = -30.0
_MAX_INT8 = 127
# Less speech tells speakers apart badly, see docs/similar-voices.md.
MIN_SPEECH_SECONDS = 2.0
# More of a long clip changes little, and takes long.
_MAX_SPEECH_SECONDS = 15.0


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_NUM_MELS, _SIZE, num_layers=3, batch_first=True)
        self.linear = nn.Linear(_SIZE, _SIZE)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        """Map ``(num_windows, 160, 40)`` to unit vectors ``(num_windows, 256)``."""
        _, (hidden, _) = self.lstm(mels)
        return nn.functional.normalize(torch.relu(self.linear(hidden[-1])), dim=1)


class TimbreEncoder:
    """Computes a vector of who speaks in a clip; safe to call from any thread.

    Raises: ConfigError: The package with the weights is missing.
    """

    def __init__(self) -> None:
        # One at a time: each thread would have torch's threads beside it.
        self._turn = threading.Lock()
        load_network()  # of the speech detector: a server without it does not start
        self._network = _Network().eval()
        # It runs no code of the file.
        stored = torch.load(_weights(), "cpu", weights_only=True)  # noqa: TID251
        weights = {
            name: weight
            for name, weight in stored["model_state"].items()
            if name.partition(".")[0] in ("lstm", "linear")
        }
        self._network.load_state_dict(weights)
        bands = mel_filter_bank(
            _WINDOW // 2 + 1,
            _NUM_MELS,
            min_frequency=0.0,
            max_frequency=_RATE_HZ / 2,
            sampling_rate=_RATE_HZ,
            norm="slaney",
            mel_scale="slaney",
        )
        self._bands = torch.from_numpy(bands).float()

    def vectors(self, audio: ReferenceAudio) -> list[bytes]:
        """Return the vector of each clip, or of all together if each is too short.

        Clips without enough speech have none.
        """
        heard = [self.vector(clip) for clip in audio.clips()]
        if heard[1:] and not any(heard):
            heard = [self.vector(audio)]
        return [vector for vector in heard if vector is not None]

    @torch.inference_mode()
    def vector(self, audio: ReferenceAudio) -> bytes | None:
        """Return 256 values of int8; None if the clip has too little speech."""
        speech = self._speech(audio)
        if speech.size < MIN_SPEECH_SECONDS * _RATE_HZ:
            return None
        spectra = torch.stft(
            torch.from_numpy(speech),
            _WINDOW,
            _HOP,
            window=torch.hann_window(_WINDOW),
            return_complex=True,
        )
        mels = (spectra.abs() ** 2).T @ self._bands
        windows = mels.unfold(0, _FRAMES, _STEP).transpose(1, 2)
        with self._turn:
            found = self._network(windows).mean(0)
        largest = float(found.max())
        if not largest > 0:  # nor NaN
            return None
        scaled = (found * (_MAX_INT8 / largest)).round().to(torch.int8)
        return scaled.numpy().tobytes()

    def _speech(self, audio: ReferenceAudio) -> npt.NDArray[np.float32]:
        rate_hz = audio.sample_rate_hz
        spans = find_speech(audio.samples, rate_hz).spans
        parts = [audio.samples[int(a * rate_hz) : int(b * rate_hz)] for a, b in spans]
        speech = np.concatenate((np.zeros(0, np.float32), *parts))
        speech = speech[: int(_MAX_SPEECH_SECONDS * rate_hz)]
        if rate_hz != _RATE_HZ and speech.size:
            speech = soxr.resample(speech, rate_hz, _RATE_HZ, quality="HQ")
        power = float(np.square(speech, dtype=np.float64).sum() / max(speech.size, 1))
        if 0 < power < 10 ** (_LEVEL_DBFS / 10):  # it was trained on louder speech
            speech = speech * np.float32(10 ** (_LEVEL_DBFS / 20) / power**0.5)
        return speech


def split(vectors: bytes) -> list[bytes]:
    """Return the vectors that were joined."""
    return [vectors[at : at + _SIZE] for at in range(0, len(vectors), _SIZE)]


def similarities(vector: bytes, others: Sequence[bytes]) -> npt.NDArray[np.float32]:
    """Return the cosine of a vector and each of the others, ``(num_others,)``."""
    one = np.frombuffer(vector, np.int8).astype(np.float32)
    many = np.frombuffer(b"".join(others), np.int8).reshape(-1, one.size)
    norms = np.sqrt(np.einsum("ij,ij->i", many, many, dtype=np.float32))
    return many @ one / (norms * np.float32(np.linalg.norm(one)))


def _weights() -> Path:
    try:
        found = [f for f in files(_PACKAGE) or () if f.name == _WEIGHTS]
        return Path(str(found[0].locate()))
    except (PackageNotFoundError, IndexError):
        raise ConfigError(
            "SPEAKER_SIMILARITY needs an encoder of speakers, which is not installed. "
            "Run: pip install --no-deps resemblyzer==0.1.4"
        ) from None
