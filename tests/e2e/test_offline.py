import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "offline_batch.py"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def test_a_batch_job_encodes_a_clip_once_and_at_rest(default_checkpoint, tmp_path):
    first, twin = tmp_path / "first.flac", tmp_path / "twin.flac"
    for clip in (first, twin):
        shutil.copy(SPEECH.path, clip)
        clip.with_suffix(".txt").write_text(SPEECH.transcript)
    other = tmp_path / "other.flac"  # without a transcript: by x-vector
    shutil.copy(OTHER_SPEECH.path, other)

    out = speak(default_checkpoint, tmp_path, [first, other, twin])

    [worker] = json.loads((out / "stats.json").read_text())
    assert worker["encodes"] == {"speaker": 2, "codec": 1}
    assert worker["failed_prompts"] == 0
    assert worker["hits"]["memory"] > 0
    audio = {clip: (out / f"{clip.stem}-1.wav").read_bytes() for clip in (first, twin)}
    assert audio[first] == audio[twin]
    assert (out / "other-1.wav").read_bytes() != audio[first]


def speak(checkpoint: Path, work: Path, clips: list[Path]) -> Path:
    out = work / "out"
    command = [EXAMPLE, "--model", checkpoint, "--out", out]
    command += ["--deploy-config", default_family().deploy_file]
    ran(work / "speakers", *command, "--text", "The tide is out.", *clips)
    return out


def ran(samples_dir: Path, *command: object) -> str:
    """What a program printed that speaks with an engine in its own process."""
    samples = {"SPEAKER_SAMPLES_DIR": str(samples_dir)}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **samples},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
