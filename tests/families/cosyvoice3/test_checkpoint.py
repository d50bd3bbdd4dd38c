"""The tiny checkpoint: what host and official code read, and what it is good for."""

import json
import math
import pickle
import shutil

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from transformers import Qwen2Config
from vllm_omni.config.config_factory import StageConfigFactory
from vllm_omni.config.stage_config import load_deploy_config
from vllm_omni.model_executor.models.cosyvoice3.cosyvoice3_code2wav import (
    CosyVoice3Code2Wav,
)
from vllm_omni.model_executor.models.cosyvoice3.tokenizer import get_qwen_tokenizer

from tests.families.cosyvoice3.case import CASE
from tests.families.cosyvoice3.written import write_cosyvoice3_checkpoint
from tests.real_talker import loaded_talker
from tests.tiny_files import contents
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.cosyvoice3.family import FAMILY
from vllm_tts_cache.families.cosyvoice3.tiny import configs, sizes
from vllm_tts_cache.families.cosyvoice3.tiny.networks import write_speaker_network
from vllm_tts_cache.families.cosyvoice3.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.tiny_checkpoint import MARKER
from vllm_tts_cache.testing.weights import WeightBuilder

# Of the released files, all that host or encoders read.
LAYOUT = {
    "CosyVoice-BlankEN/config.json",
    "CosyVoice-BlankEN/merges.txt",
    "CosyVoice-BlankEN/tokenizer.json",
    "CosyVoice-BlankEN/tokenizer_config.json",
    "CosyVoice-BlankEN/vocab.json",
    "campplus.onnx",
    "config.json",
    "flow.pt",
    "hift.pt",
    "llm.pt",
    "speech_tokenizer_v3.onnx",
}


def tensors(checkpoint, name):
    return torch.load(checkpoint / name, weights_only=True)


# The files


def test_it_has_the_released_files_and_says_that_it_is_no_model(cosyvoice3_checkpoint):
    files = contents(cosyvoice3_checkpoint)
    assert set(files) == LAYOUT | {"README.txt", MARKER}
    assert files["README.txt"].startswith(b"Random weights, not a model.")
    assert files["config.json"] == b"{}\n"


def test_the_seed_changes_all_weights(cosyvoice3_checkpoint, tmp_path):
    other = write_cosyvoice3_checkpoint(tmp_path / "other", CheckpointOptions(seed=1))
    one, two = contents(cosyvoice3_checkpoint), contents(other)
    changed = {name for name in one if one[name] != two[name]}
    weights = {name for name in LAYOUT if name.endswith((".pt", ".onnx"))}
    assert changed == weights | {MARKER}


def test_an_impossible_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="encoders"):
        CheckpointOptions(encoders="huge")  # pyright: ignore[reportArgumentType]


# What reads them


def test_the_deploy_file_tells_both_stages_the_sizes(cosyvoice3_checkpoint):
    assert FAMILY.deploy_file is not None
    raw = yaml.safe_load(FAMILY.deploy_file.read_text())
    for stage in raw["stages"]:
        told = stage["engine_extras"]["hf_overrides"]
        assert told == configs.host_overrides()
    deploy = load_deploy_config(FAMILY.deploy_file)
    found = StageConfigFactory.get_pipeline_config(
        str(cosyvoice3_checkpoint),
        trust_remote_code=True,
        deploy_config_path=str(FAMILY.deploy_file),
    )
    assert deploy.pipeline == "cosyvoice3"
    assert found is not None and found.model_type == "cosyvoice3"


def test_what_the_host_is_told_is_all_that_it_has_in_the_same_form():
    """A size left out would be the released one, and end the start with a shape."""
    from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

    hosts = CosyVoice3Config()
    for name, value in configs.host_overrides().items():
        assert shape_of(value) == shape_of(getattr(hosts, name)), name


def shape_of(value):
    if isinstance(value, dict):
        return {name: shape_of(each) for name, each in value.items()}
    return type(value).__name__ if isinstance(value, (list, str)) else "number"


def test_the_host_finds_every_weight_of_its_decoder_and_no_other(cosyvoice3_checkpoint):
    decoder = CosyVoice3Code2Wav(CASE.hf_config(cosyvoice3_checkpoint))
    decoder.load_weights(str(cosyvoice3_checkpoint), torch.device("cpu"))
    flow, hift = decoder.flow_model.state_dict(), decoder.hift.state_dict()
    assert tensors(cosyvoice3_checkpoint, "flow.pt").keys() == flow.keys()
    assert tensors(cosyvoice3_checkpoint, "hift.pt").keys() == hift.keys()


class Marks:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (self.path.touch, ())


@pytest.mark.parametrize("name", ["flow.pt", "hift.pt"])
def test_weights_that_would_run_code_are_refused(cosyvoice3_checkpoint, tmp_path, name):
    """The host leaves that to torch, which did not refuse them before 2.6."""
    copy = shutil.copytree(cosyvoice3_checkpoint, tmp_path / "copy")
    torch.save({"weight": Marks(tmp_path / "ran")}, copy / name)
    decoder = CosyVoice3Code2Wav(CASE.hf_config(copy))
    with pytest.raises(pickle.UnpicklingError):
        decoder.load_weights(str(copy), torch.device("cpu"))
    assert not (tmp_path / "ran").exists()


def test_weights_of_the_talker_that_would_run_code_are_refused(
    cosyvoice3_checkpoint, tmp_path
):
    copy = shutil.copytree(cosyvoice3_checkpoint, tmp_path / "copy")
    torch.save({"weight": Marks(tmp_path / "ran")}, copy / "llm.pt")
    talker = loaded_talker(CASE, copy, tmp_path, enable_prefix_caching=False)
    with pytest.raises(pickle.UnpicklingError), talker:
        pass
    assert not (tmp_path / "ran").exists()


def test_constants_among_the_weights_are_the_hosts(cosyvoice3_checkpoint):
    """What is no weight and yet in the file: it must not be random."""
    decoder = CosyVoice3Code2Wav(CASE.hf_config(cosyvoice3_checkpoint))
    name = "decoder.estimator.rotary_embed.inv_freq"
    expected = decoder.flow_model.state_dict()[name]
    found = tensors(cosyvoice3_checkpoint, "flow.pt")[name]
    assert torch.equal(found, expected)


def test_the_talkers_tables_have_the_released_number_of_rows(cosyvoice3_checkpoint):
    llm = tensors(cosyvoice3_checkpoint, "llm.pt")
    hidden = sizes.TALKER.hidden
    for name in ("speech_embedding.weight", "llm_decoder.weight"):
        assert llm[name].shape == (6_561 + 200, hidden)
    config = Qwen2Config.from_pretrained(cosyvoice3_checkpoint / configs.TALKER_FOLDER)
    assert llm["llm.model.model.embed_tokens.weight"].shape == (
        config.vocab_size,
        hidden,
    )
    assert config.hidden_size == hidden


@pytest.fixture(scope="module")
def tokenizer(cosyvoice3_checkpoint):
    folder = cosyvoice3_checkpoint / configs.TALKER_FOLDER
    return get_qwen_tokenizer(str(folder), True, "cosyvoice3")


@pytest.mark.parametrize(
    "text",
    [
        "Hello there.",
        "One, two; 42!",
        "Grüße, naïve café",
        "你好, 世界.",
        "[breath] a b",
    ],
)
def test_any_text_is_spelt_by_ids_that_the_talker_has(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids and max(ids) < sizes.TEXT_VOCAB_SIZE
    assert tokenizer.tokenizer.decode(ids) == text


def test_the_hosts_marks_are_one_token_each_and_fit(tokenizer):
    assert len(tokenizer.tokenizer) <= sizes.TEXT_VOCAB_SIZE
    for mark in ("<|endofprompt|>", "[breath]", "<|endofsystem|>", "[ǐ]"):
        assert len(tokenizer.encode(mark)) == 1


# What stands in for the ONNX files


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5, 99, 100, 101, 2_999, 3_000])
def test_the_tokenizer_halves_twice_and_rounds_up(cosyvoice3_checkpoint, num_frames):
    session = onnxruntime.InferenceSession(
        str(cosyvoice3_checkpoint / "speech_tokenizer_v3.onnx")
    )
    frames = np.random.default_rng(0).normal(0, 0.5, (1, 128, num_frames))
    given = {
        "feats": frames.astype(np.float32),
        "feats_length": np.array([num_frames], np.int32),
    }
    assert [i.name for i in session.get_inputs()] == list(given)
    codes = np.asarray(session.run(None, given)[0])
    assert codes.shape == (1, math.ceil(math.ceil(num_frames / 2) / 2))
    assert codes.min() >= 0 and codes.max() < 6_561


def test_codes_are_all_over_the_codebook(cosyvoice3_checkpoint):
    session = onnxruntime.InferenceSession(
        str(cosyvoice3_checkpoint / "speech_tokenizer_v3.onnx")
    )
    frames = np.random.default_rng(0).normal(0, 0.5, (1, 128, 4_000))
    given = {
        "feats": frames.astype(np.float32),
        "feats_length": np.array([4_000], np.int32),
    }
    codes = np.asarray(session.run(None, given)[0]).flatten()
    assert len(np.unique(codes)) > 300
    digits = codes[:, None] // 3 ** np.arange(8) % 3
    for digit in range(3):
        assert 0.1 < (digits == digit).mean() < 0.7


@pytest.mark.slow
def test_real_stand_ins_have_as_many_weights_as_the_released_networks(tmp_path):
    weights = WeightBuilder(0)
    write_speaker_network(tmp_path / "campplus.onnx", weights, sizes.SPEAKER["real"])
    num_weights = sum(t.numel() for t in weights.tensors.values())
    assert num_weights == pytest.approx(7.2e6, rel=0.15)
    size = sizes.TOKENIZER["real"]
    blocks = 2 * size.num_blocks * size.width * size.inner
    halving = 3 * size.width * (sizes.TOKENIZER_MELS + size.width)
    assert blocks + halving == pytest.approx(242e6, rel=0.05)


def test_the_config_of_the_talker_is_as_written(cosyvoice3_checkpoint):
    path = cosyvoice3_checkpoint / configs.TALKER_FOLDER / "config.json"
    written = json.loads(path.read_text())
    assert written == configs.talker_config(written["eos_token_id"])
