"""The encodings of qwen-tts 0.1.1 with transformers 4.57.3 in float32."""

import os
import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file

from tests.families.clip import Clip

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[2] / "scripts"
TOLERANCE = {"speaker": 1e-6}
# Lengths: the shortest and longest allowed, primes, whole frames and one more, both
# sides of the 10 s that the host's attention window spans, and, at 44.1 kHz, some that
# floating point rounds up where exact arithmetic does not: 45,864 samples become one
# sample more than 13 frames, so 14.
CLIPS = (
    Clip(8_000, 8_000),
    Clip(8_000, 84_000, 2),
    Clip(11_025, 11_027),
    Clip(11_025, 55_127, 2, "PCM_24"),
    Clip(16_000, 16_001, 1, "FLOAT"),
    Clip(16_000, 479_520),
    Clip(22_050, 23_173, 2),
    Clip(22_050, 231_529, 1, "PCM_24"),
    Clip(24_000, 24_000),
    Clip(24_000, 48_000, 1, "FLOAT"),
    Clip(24_000, 48_001, 2, "PCM_24"),
    Clip(24_000, 720_000),
    Clip(32_000, 32_003, 6),
    Clip(32_000, 64_007, 2, "FLOAT"),
    Clip(44_100, 44_101),
    Clip(44_100, 45_864, 2, "PCM_24"),
    Clip(44_100, 463_050, 1, "FLOAT"),
    Clip(44_100, 1_323_000, 2),
    Clip(48_000, 48_017, 1, "PCM_24"),
    Clip(48_000, 504_000, 2, "FLOAT"),
    Clip(96_000, 100_003, 2),
    Clip(96_000, 191_999, 1, "PCM_24"),
    Clip(192_000, 192_007, 1, "FLOAT"),
    Clip(192_000, 576_000, 2),
)


def encodings(checkpoint, folder, paths):
    """In a process of its own, which has that package."""
    installed = subprocess.run(
        (sys.executable, str(SCRIPTS / "official_qwen_tts.py")),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    out = folder / "encodings.safetensors"
    subprocess.run(
        (
            *(sys.executable, str(HERE / "official_encode.py")),
            *(str(checkpoint), str(out), *map(str, paths)),
        ),
        check=True,
        env={**os.environ, "PYTHONPATH": installed, "OMP_NUM_THREADS": "1"},
    )
    arrays = {"codec": "codes", "speaker": "embedding"}
    found = load_file(out)
    return {
        (path.stem, name): found[f"{path.stem}/{array}"]
        for path in paths
        for name, array in arrays.items()
    }
