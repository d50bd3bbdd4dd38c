"""How tiny checkpoints are written: whole or not at all, and over nobody's work."""

import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_files import contents
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.fish_speech.tiny import sizes as fish
from vllm_tts_cache.families.fish_speech.tiny.codec_weights import add_codec
from vllm_tts_cache.families.voxcpm2.tiny import sizes as voxcpm2
from vllm_tts_cache.families.voxcpm2.tiny.audio_vae_weights import add_audio_vae
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

TINY = TinyCheckpoint.of(default_family())


def test_a_weight_depends_on_the_seed_and_its_own_name_only():
    def draw(seed, *names):
        builder = WeightBuilder(seed)
        for name in names:
            builder.under("layer").normal(name, (3, 5), 1.0)
        return builder.tensors["layer.b"]

    assert torch.equal(draw(0, "b"), draw(0, "a", "b", "c"))
    assert not torch.equal(draw(0, "b"), draw(1, "b"))


def test_an_impossible_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="eos_logit"):
        TinyCheckpoint.of(default_family(), eos_logit=float("nan"))


def test_what_is_not_ours_is_left_alone_even_with_force(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("three years of work")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    for name, says in (
        ("work", "left alone"),
        ("file", "not a directory"),
        ("link", "not a directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            TINY.write(tmp_path / name, force=True)
    assert contents(tmp_path) == before


def test_an_empty_directory_is_filled_and_ours_is_replaced_with_force_only(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert TINY.write(out) == out
    (out / "stale").write_text("from the run before")
    with pytest.raises(ConfigError, match="--force"):
        TINY.write(out)
    assert (out / "stale").exists()
    TINY.write(out, force=True)
    assert not (out / "stale").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupted_run_leaves_what_was_there(tmp_path):
    out = TINY.write(tmp_path / "out")
    before = contents(out)

    def interrupt(step: str) -> None:
        if step == "speech tokenizer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TinyCheckpoint.of(default_family(), seed=1).write(out, interrupt, force=True)
    assert contents(out) == before
    assert list(tmp_path.iterdir()) == [out]


def test_a_killed_run_leaves_no_half_checkpoint(tmp_path):
    script = (
        "import os, pathlib, signal, sys\n"
        "from tests.families.test_tiny_checkpoint import TINY\n"
        "def die(step):\n"
        "    if step == 'speech tokenizer': os.kill(os.getpid(), signal.SIGKILL)\n"
        "TINY.write(pathlib.Path(sys.argv[1]), die)\n"
    )
    out = tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "-c", script, str(out)],
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert TINY.write(out) == out


# -------- with encoders of the released sizes


class Shapes(WeightBuilder):
    """Draws nothing, so that the released sizes cost nothing."""

    def under(self, prefix):
        return Shapes(self._seed, f"{self._prefix}{prefix}.", self.tensors)

    def normal(self, name, shape, std):
        return self._add(name, torch.empty(tuple(shape), device="meta"))

    def fill(self, name, shape, value):
        return self._add(name, torch.empty(tuple(shape), device="meta"))


def shapes_of(tensors, prefix=""):
    """But of what is computed and may be in a file as well."""
    return {
        name: tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(prefix) and not name.endswith(("freqs_cis", "causal_mask"))
    }


def num_weights(shapes):
    return sum(math.prod(shape) for shape in shapes.values())


def test_a_codec_of_fish_speech_has_the_names_and_shapes_that_the_host_expects():
    from vllm_omni.model_executor.models.fish_speech.dac_utils import build_dac_codec

    real = Shapes(0)
    add_codec(real, fish.CODEC["real"])
    with torch.device("meta"):
        expected = build_dac_codec().state_dict()
    assert shapes_of(real.tensors) == shapes_of(expected)
    assert num_weights(shapes_of(expected)) > 390e6


def test_an_encoder_of_voxcpm2_has_those_of_the_official_defaults():
    from voxcpm.modules.audiovae import AudioVAEConfigV2, AudioVAEV2

    real = Shapes(0)
    add_audio_vae(real, voxcpm2.ENCODER_DIM["real"])
    with torch.device("meta"):
        expected = AudioVAEV2(AudioVAEConfigV2()).state_dict()
    found = shapes_of(real.tensors, "encoder.")
    assert found == shapes_of(expected, "encoder.")
    assert num_weights(found) == pytest.approx(48.4e6, 0.01)
