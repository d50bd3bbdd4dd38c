"""A model family from another package: installed, it is one like ours."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.audio_clips import sndfile_bytes, voiced
from tests.cli_runs import MAIN

PACKAGE = {
    "toy_family/__init__.py": "",
    "toy_family/family.py": """
from vllm_tts_cache.speaker.checkpoint_dir import config_says
from vllm_tts_cache.speaker.family import ClipLimits, Family
from vllm_tts_cache.speaker.family import Mode, Transcript

FAMILY = Family(
    name="toy",
    short_name="toy",
    title="Toy",
    modes=(
        Mode(name="loudness", encoders=("peak",), transcript=Transcript.UNUSED),
    ),
    recognises=lambda model_dir: config_says(model_dir, "model_type", "toy"),
    adapter="toy_family.adapter:ToyAdapter",
    encoders_part="toy_family.encoders:load",
    tiny_part="toy_family.tiny:write",
    sample_rate_hz=8_000,
    limits=ClipLimits(max_seconds=10),
)
""",
    "toy_family/encoders.py": """
import hashlib

import numpy as np

from vllm_tts_cache.speaker.reference import MemoryNeed
from vllm_tts_cache.store.encoding import Encoding


class Peak:
    name = "peak"
    fingerprint = hashlib.sha256(b"peak 1").hexdigest()
    need = MemoryNeed()

    def encode(self, audio):
        return Encoding({"peak": np.abs(audio.samples).max(keepdims=True)})


def load(model_dir, device):
    return {"peak": Peak()}
""",
    "toy_family/tiny.py": """
import json


def write(directory, options, report):
    report("config")
    (directory / "config.json").write_text(json.dumps({"model_type": "toy"}))
""",
    "toy_family-1.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: toy_family\nVersion: 1\n"
    ),
    "toy_family-1.dist-info/entry_points.txt": (
        "[vllm_tts_cache.families]\n"
        "toy = toy_family.family:FAMILY\n"
        "broken = toy_family.nowhere:FAMILY\n"
    ),
}


@pytest.fixture
def command(tmp_path):
    """Our command line, where the package is installed."""
    for name, text in PACKAGE.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{Path.cwd()}"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_it_is_listed_written_and_encoded_like_ours(command, tmp_path):
    listed = command("families", "--markdown")
    cells = ("Toy", "toy", "loudness (transcript unused)", "peak", "up to 10 s", "")
    assert f"| {' | '.join(cells)} | no | no |  |" in listed.stdout
    # One that cannot be imported costs nobody else anything.
    assert "family broken is left out" in listed.stderr

    model, clip = tmp_path / "model", tmp_path / "clip.wav"
    made = command("make-checkpoint", "--family", "toy", "-o", str(model))
    assert made.returncode == 0, made.stderr
    assert "toy" in (model / "config.json").read_text()

    samples = voiced(8_000, 1.0)
    clip.write_bytes(sndfile_bytes(samples, 8_000, subtype="FLOAT"))
    out = tmp_path / "out.safetensors"
    encoded = command("encode", "--model", str(model), "--out", str(out), str(clip))
    assert encoded.returncode == 0, encoded.stderr
    peak = np.abs(samples[:, 0].astype(np.float32)).max(keepdims=True)
    assert np.array_equal(load_file(out)["clip/peak/peak"], peak)


def test_the_readme_names_every_model_that_clones(command):
    listed = command("families", "--markdown").stdout
    rows = [line.split(" | ") for line in listed.splitlines()[2:]]
    clone = [title[2:] for title, _, modes, *_ in rows if modes != "none"]
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("## Models")[2].partition("## ")[0]
    assert [title for title in clone if title not in table] == ["Toy"]
