"""Spans of speech are those that the detector's own package finds."""

import json
import subprocess
import sys

import numpy as np
import pytest
import soxr

from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.speech_detector import at_one_level, find_speech
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

# In a process of its own: the package sets the number of torch's threads.
OFFICIAL = """
import json, sys
import numpy, torch
from silero_vad import get_speech_timestamps, load_silero_vad
model = load_silero_vad(onnx=True)
samples = torch.from_numpy(numpy.load(sys.argv[1]))
print(json.dumps(get_speech_timestamps(samples, model)))
"""


def parted(clip):
    """The clip at 16 kHz, between silence and with a pause and a short noise in it."""
    audio = decode_path(clip.path).audio
    samples = soxr.resample(audio.samples, audio.sample_rate_hz, 16_000)
    hiss = np.random.default_rng(0).normal(0, 0.01, 16_000).astype(np.float32)
    return np.concatenate((hiss, samples[:30_000], hiss * 3, hiss, samples[30_000:]))


@pytest.mark.parametrize("clip", [SPEECH, OTHER_SPEECH])
def test_spans_are_the_packages_own(clip, tmp_path):
    samples = parted(clip)
    np.save(tmp_path / "clip.npy", at_one_level(samples, 16_000))
    command = [sys.executable, "-c", OFFICIAL, str(tmp_path / "clip.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    official = [(span["start"], span["end"]) for span in found]
    ours = find_speech(samples, 16_000).spans
    assert [(round(a * 16_000), round(b * 16_000)) for a, b in ours] == official
    assert len(official) >= 2
