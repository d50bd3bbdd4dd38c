import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import linear, silu

from tests.families.qwen3_tts.written import write_qwen3_tts_checkpoint
from tests.tiny_files import contents
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.tiny_checkpoint import MARKER
from vllm_tts_cache.testing.weights import WeightBuilder

RELEASED_LAYOUT = {
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors",
    "preprocessor_config.json",
    "speech_tokenizer/config.json",
    "speech_tokenizer/model.safetensors",
    "speech_tokenizer/preprocessor_config.json",
    "tokenizer_config.json",
    "vocab.json",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_qwen3_tts_checkpoint(tmp_path_factory.mktemp("module") / "tiny")


@pytest.fixture(scope="module")
def weights(checkpoint):
    return load_file(checkpoint / "model.safetensors")


def test_it_has_the_released_files_and_says_that_it_is_no_model(checkpoint):
    files = contents(checkpoint)
    assert set(files) == RELEASED_LAYOUT | {"tokenizer.json", "README.txt", MARKER}
    assert files["README.txt"].startswith(b"Random weights, not a model.")


@pytest.mark.parametrize(
    "options",
    [
        CheckpointOptions(seed=1),
        CheckpointOptions(sensitive=False),
        CheckpointOptions(eos_logit=5.0),
    ],
)
def test_every_option_changes_the_weights(checkpoint, tmp_path, options):
    other = write_qwen3_tts_checkpoint(tmp_path / "other", options)
    name = "model.safetensors"
    assert (other / name).read_bytes() != (checkpoint / name).read_bytes()
    assert json.loads((other / MARKER).read_text())["seed"] == options.seed


def test_the_talker_is_bfloat16_and_the_speech_tokenizer_float32(checkpoint, weights):
    codec = load_file(checkpoint / "speech_tokenizer" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in codec.values()} == {torch.float32}


def test_a_weight_depends_on_the_seed_and_its_own_name_only():
    def draw(seed, *names):
        builder = WeightBuilder(seed)
        for name in names:
            builder.under("layer").normal(name, (3, 5), 1.0)
        return builder.tensors["layer.b"]

    assert torch.equal(draw(0, "b"), draw(0, "a", "b", "c"))
    assert not torch.equal(draw(0, "b"), draw(1, "b"))


def test_only_padding_after_the_text_can_end_the_speech(checkpoint, weights):
    config = json.loads((checkpoint / "config.json").read_text())
    embedding = weights["talker.model.text_embedding.weight"].float()
    prefix = "talker.text_projection.linear_fc"
    projected = linear(
        silu(linear(embedding, weights[f"{prefix}1.weight"].float())),
        weights[f"{prefix}2.weight"].float(),
    )
    pad = config["tts_pad_token_id"]
    assert projected[pad, 0] == pytest.approx(1.0, abs=0.01)
    assert projected[:pad, 0].abs().max() == projected[pad + 1 :, 0].abs().max() == 0
    writers = [
        tensor
        for name, tensor in weights.items()
        if name.startswith("talker.model.layers.")
        and name.endswith(("o_proj.weight", "down_proj.weight"))
    ]
    assert len(writers) == 4
    assert not any(tensor[0].any() for tensor in writers)
    codes = [tensor for name, tensor in weights.items() if "codec_embedding" in name]
    assert len(codes) == 16
    assert not any(tensor[:, 0].any() for tensor in codes)
    head = weights["talker.codec_head.weight"]
    eos = config["talker_config"]["codec_eos_token_id"]
    assert eos == 2150
    assert head[:, 0].nonzero().tolist() == [[eos]]
    assert head[eos].nonzero().tolist() == [[0]]


def test_the_prompt_template_has_the_token_counts_that_the_host_cuts_by(checkpoint):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = "Grüße, 你好 and 42!"
    encoded = tokenizer.encode(
        f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encoded.tokens[:3] == ["<|im_start|>", "assistant", "Ċ"]
    assert encoded.tokens[-5:] == ["<|im_end|>", "Ċ", *encoded.tokens[:3]]
    assert tokenizer.decode(encoded.ids[3:-5]) == text


def test_real_encoders_have_the_released_sizes_and_the_talker_stays_tiny(tmp_path):
    options = CheckpointOptions(encoders="real")
    real = write_qwen3_tts_checkpoint(tmp_path / "real", options)
    config = json.loads((real / "config.json").read_text())
    codec = json.loads((real / "speech_tokenizer" / "config.json").read_text())
    assert config["speaker_encoder_config"]["enc_channels"] == [
        512,
        512,
        512,
        512,
        1536,
    ]
    assert config["speaker_encoder_config"]["enc_dim"] == 128
    assert config["talker_config"]["hidden_size"] == 128
    assert codec["encoder_config"]["hidden_size"] == 512
    assert codec["encoder_config"]["num_hidden_layers"] == 8


@pytest.mark.parametrize("options", [{"encoders": "huge"}, {"eos_logit": float("nan")}])
def test_an_impossible_option_is_refused_by_name(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CheckpointOptions(**options)


def test_a_foreign_directory_is_left_alone_even_with_force(tmp_path):
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(ConfigError, match="left alone"):
        write_qwen3_tts_checkpoint(tmp_path, force=True)
    assert contents(tmp_path) == {"thesis.txt": b"three years of work"}


def test_a_file_or_a_link_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="not a directory"):
            write_qwen3_tts_checkpoint(tmp_path / name, force=True)


def test_an_empty_directory_is_filled(tmp_path):
    assert write_qwen3_tts_checkpoint(tmp_path) == tmp_path
    assert set(contents(tmp_path)) > RELEASED_LAYOUT


def test_ours_is_replaced_with_force_only(tmp_path):
    out = write_qwen3_tts_checkpoint(tmp_path / "out")
    (out / "stale").write_text("from the run before")
    with pytest.raises(ConfigError, match="--force"):
        write_qwen3_tts_checkpoint(out)
    assert (out / "stale").exists()
    write_qwen3_tts_checkpoint(out, force=True)
    assert not (out / "stale").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupted_run_leaves_what_was_there(tmp_path):
    out = write_qwen3_tts_checkpoint(tmp_path / "out")
    before = contents(out)

    def interrupt(step: str) -> None:
        if step == "speech tokenizer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_qwen3_tts_checkpoint(
            out, CheckpointOptions(seed=1), force=True, report=interrupt
        )
    assert contents(out) == before
    assert list(tmp_path.iterdir()) == [out]


def test_a_killed_run_leaves_no_half_checkpoint(tmp_path):
    script = (
        "import os, pathlib, signal, sys\n"
        "from tests.families.qwen3_tts import written\n"
        "def die(step):\n"
        "    if step == 'speech tokenizer': os.kill(os.getpid(), signal.SIGKILL)\n"
        "written.write_qwen3_tts_checkpoint(pathlib.Path(sys.argv[1]), report=die)\n"
    )
    out = tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "-c", script, str(out)],
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    write_qwen3_tts_checkpoint(out)
    assert set(contents(out)) > RELEASED_LAYOUT
