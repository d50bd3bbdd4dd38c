"""Finds speech in a clip by Silero's detector.

ONNX Runtime runs its network, which is read from the installed package. The package is
never imported: it loads torch, and sets torch's number of threads for the process.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import soxr

from vllm_tts_cache.audio.decode import active_level_dbfs
from vllm_tts_cache.errors import ConfigError

_PACKAGE = "silero_vad"
# Takes many frames at a time: the usual network would be called 940 times for 30 s.
_NETWORK = Path("data", "silero_vad_16k_sequence.onnx")

_RATE_HZ = 16_000
_FRAME = 512
_FRAME_SECONDS = _FRAME / _RATE_HZ
_CONTEXT = 64  # samples of the previous frame, which the network sees again
_FRAMES_AT_ONCE = 512  # bounds the memory of one call
_STATE = (1, 1, 128)

# How the package makes spans of probabilities, by default.
_BEGINS_AT = 0.5
_ENDS_BELOW = 0.35
_MIN_PAUSE_SECONDS = 0.1
_MIN_SPEECH_SECONDS = 0.25
_MARGIN_SECONDS = 0.03

# The detector finds less in a quiet clip, so every clip is brought to one level.
_LEVEL_DBFS = -20.0
_ERRORS_ONLY = 3

Samples = npt.NDArray[np.float32]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Speech:
    """The spans of a clip that are speech: start and end in seconds, in order."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """The duration of the speech, without pauses."""
        return sum(end - start for start, end in self.spans)

    @property
    def longest_pause_seconds(self) -> float:
        """The longest pause between two spans; 0 without one."""
        pairs = pairwise(self.spans)
        return max((later[0] - earlier[1] for earlier, later in pairs), default=0.0)

    def covers(
        self, seconds: npt.NDArray[np.float64], margin: float = 0.0
    ) -> npt.NDArray[np.bool_]:
        """Tell which points in time are in speech, or within a margin around it."""
        inside = np.zeros(seconds.shape, dtype=bool)
        for start, end in self.spans:
            inside |= (seconds >= start - margin) & (seconds < end + margin)
        return inside


def find_speech(samples: Samples, sample_rate_hz: int) -> Speech:
    """Find speech in ``(num_samples,)`` audio whose peak is near 1, in any thread.

    Raises: ConfigError: As `load_network`.
    """
    heard = at_one_level(samples, sample_rate_hz)
    if sample_rate_hz != _RATE_HZ:
        heard = soxr.resample(heard, sample_rate_hz, _RATE_HZ, quality="HQ")
    seconds = samples.size / sample_rate_hz
    return Speech(
        tuple(
            (max(0.0, start - _MARGIN_SECONDS), min(seconds, end + _MARGIN_SECONDS))
            for start, end in _spans(_probabilities(heard))
            if start < seconds
        )
    )


def _probabilities(samples: Samples) -> npt.NDArray[np.float32]:
    """The probability that each 32 ms are speech: ``(num_frames,)``."""
    num_frames = -(-samples.size // _FRAME)
    frames = np.zeros((num_frames, _FRAME), np.float32)
    frames.reshape(-1)[: samples.size] = samples
    context = np.zeros((num_frames, _CONTEXT), np.float32)
    context[1:] = frames[:-1, -_CONTEXT:]
    seen = np.concatenate((context, frames), axis=1)
    hidden = cell = np.zeros(_STATE, np.float32)
    found, session = [np.zeros(0, np.float32)], load_network()
    for start in range(0, num_frames, _FRAMES_AT_ONCE):
        block = seen[start : start + _FRAMES_AT_ONCE]
        probabilities, hidden, cell = session.run(
            ["speech_probs", "hn", "cn"], {"input": block, "h": hidden, "c": cell}
        )
        found.append(np.asarray(probabilities).reshape(-1))
    return np.concatenate(found)


def one_thread_session(path: Path) -> onnxruntime.InferenceSession:
    """Load a network that the calling thread computes alone, on the CPU.

    With one thread a sum has one order, so a clip gives the same on every machine of a
    kind. The runtime's own threads would not have the caller's low priority, either.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    # The arena would keep as much memory as the longest clip ever took.
    options.enable_cpu_mem_arena = False
    # The runtime would keep a memory plan for each length of a clip, 45 KiB measured,
    # and never free one. The results are the same.
    options.enable_mem_pattern = False
    options.log_severity_level = _ERRORS_ONLY
    return onnxruntime.InferenceSession(
        str(path), sess_options=options, providers=["CPUExecutionProvider"]
    )


@cache
def load_network() -> onnxruntime.InferenceSession:
    """Return the process's network, which the first call loads.

    Raises: ConfigError: The package with it is missing, or too old to have it.
    """
    spec = find_spec(_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        if (path := Path(location) / _NETWORK).is_file():
            return one_thread_session(path)
    raise ConfigError(
        f"Clips cannot be checked: {_NETWORK.name} is not installed. "
        "Run: pip install 'silero-vad>=6.2.3'"
    )


def at_one_level(samples: Samples, sample_rate_hz: int) -> Samples:
    """Remove the offset, and bring the clip to the detector's level."""
    centred = samples - np.mean(samples, dtype=np.float64)
    level_dbfs = active_level_dbfs(samples, sample_rate_hz)
    gain = 10 ** ((_LEVEL_DBFS - level_dbfs) / 20)
    # Clipped, or the detector would find a click and no speech beside it.
    return np.clip(centred * gain, -1.0, 1.0).astype(np.float32)


def _spans(probabilities: npt.NDArray[np.float32]) -> list[Span]:
    """Spans of speech in seconds, with short pauses and without short sounds."""
    spans: list[Span] = []
    for start, end in _runs(probabilities):
        if spans and start - spans[-1][1] < _MIN_PAUSE_SECONDS:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return [span for span in spans if span[1] - span[0] > _MIN_SPEECH_SECONDS]


def _runs(probabilities: npt.NDArray[np.float32]) -> list[Span]:
    """Spans from a frame that reaches `_BEGINS_AT` to one below `_ENDS_BELOW`."""
    runs: list[Span] = []
    begun: int | None = None
    for frame, probability in enumerate((*probabilities.tolist(), 0.0)):
        if begun is None and probability >= _BEGINS_AT:
            begun = frame
        elif begun is not None and probability < _ENDS_BELOW:
            runs.append((begun * _FRAME_SECONDS, frame * _FRAME_SECONDS))
            begun = None
    return runs
