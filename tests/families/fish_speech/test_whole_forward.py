"""What a request gets does not depend on what else a CPU computes, end to end.

Run for what the processor has and for less; the junit property `processor` says which.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tts_cache import platforms

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.families.fish_speech.whole_forward"
TIMEOUT_SECONDS = 600
# The limits of oneDNN and torch, which of vLLM's libraries, and how many threads.
# With bfloat16 instructions, "as it is" is also all that we use of AMX.
PROCESSORS = {
    "as-it-is": ({}, "best", 1),
    "avx512": ({platforms.MAX_ISA: "AVX512_CORE"}, "best", 1),
    "avx2": ({platforms.MAX_ISA: "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, "avx2", 1),
}


# The two ends in every run; what lies between takes as long as either.
@pytest.mark.slow
@pytest.mark.parametrize(
    "processor",
    [
        pytest.param(p, marks=pytest.mark.long if p == "avx512" else ())
        for p in PROCESSORS
    ],
)
def test_the_whole_slow_ar_gives_a_request_the_same_bits_in_any_batch_and_chunk(
    own_checkpoint, tmp_path, processor, record_property
):
    limits, kernels, num_threads = PROCESSORS[processor]
    ran = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", PROGRAM),
            *(str(own_checkpoint), str(tmp_path), "--kernels", kernels),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            **limits,
            "OMP_NUM_THREADS": str(num_threads),
            "SPEAKER_SAMPLES_DIR": str(tmp_path / "samples"),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3_000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    spoken = told.pop("spoken")
    record_property("processor", json.dumps(told))
    heard = {}
    for way, requests in spoken.items():
        for name, digest in requests.items():
            heard.setdefault(name, {}).setdefault(digest, []).append(way)
    assert {len(ways) for ways in heard.values()} == {1}, (told, heard)
