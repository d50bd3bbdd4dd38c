"""Our encodings are those of qwen-tts 0.1.1 with transformers 4.57.3 in float32."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.families.clip import Clip as SteadyClip
from tests.families.clip import Samples
from tests.torch_threads import on_threads
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.qwen3_tts.encoders import load_reference_encoders
from vllm_tts_cache.speaker.reference_encoder import ReferenceEncoder
from vllm_tts_cache.store.encoding import Array

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[2] / "scripts"


class Clip(SteadyClip):
    """With vibrato."""

    def loudness(self, seconds: Samples) -> Samples:
        return 0.6 + 0.4 * np.sin(2 * np.pi * 2.3 * seconds)


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


@pytest.fixture(scope="module")
def wavs(tmp_path_factory: pytest.TempPathFactory) -> dict[Clip, Path]:
    directory = tmp_path_factory.mktemp("official-clips")
    return {clip: clip.write(directory) for clip in CLIPS}


@pytest.fixture(scope="module")
def official(
    qwen3_checkpoint: Path, wavs: dict[Clip, Path], tmp_path_factory
) -> Mapping[str, Array]:
    installed = subprocess.run(
        (sys.executable, str(SCRIPTS / "official_qwen_tts.py")),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    out = tmp_path_factory.mktemp("official") / "encodings.safetensors"
    subprocess.run(
        (
            *(sys.executable, str(HERE / "official_encode.py")),
            *(str(qwen3_checkpoint), str(out), *map(str, wavs.values())),
        ),
        check=True,
        env={**os.environ, "PYTHONPATH": installed, "OMP_NUM_THREADS": "1"},
    )
    return load_file(out)


@pytest.fixture(scope="module")
def encoders(qwen3_checkpoint: Path) -> Iterator[dict[str, ReferenceEncoder]]:
    # One thread on both sides: these networks are too small to share, and two
    # processes that spin for the same cores take three times as long.
    with on_threads(1):
        yield load_reference_encoders(qwen3_checkpoint, torch.device("cpu"))


def read(path: Path) -> ReferenceAudio:
    return decode_path(path).audio


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.stem)
def test_codes_equal_the_official_ones_exactly(clip, wavs, official, encoders):
    ours = encoders["codec"].encode(read(wavs[clip]))["codes"]
    theirs = official[f"{clip.stem}/codes"]
    assert ours.shape == theirs.shape
    assert np.array_equal(ours, theirs), (
        f"{(ours != theirs).mean():.2%} of codes differ"
    )


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.stem)
def test_speaker_embedding_is_within_1e_6_of_the_official_one(
    clip, wavs, official, encoders
):
    ours = encoders["speaker"].encode(read(wavs[clip]))["speaker_embedding"]
    theirs = official[f"{clip.stem}/embedding"]
    assert ours.shape == theirs.shape
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert error < 1e-6


def test_the_test_checkpoint_tells_clips_apart(official):
    """Otherwise the comparisons above would hold for any encoder."""
    embeddings = [v for k, v in official.items() if k.endswith("/embedding")]
    directions = np.stack([e / np.linalg.norm(e) for e in embeddings])
    cosines = directions @ directions.T
    assert cosines[np.triu_indices(len(directions), 1)].min() < 0.99
    codes = [v for k, v in official.items() if k.endswith("/codes")]
    assert min(len(np.unique(c[:, 0])) / len(c) for c in codes) > 0.2
