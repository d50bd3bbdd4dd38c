"""The tiny checkpoint: what official package and host read, and what it is good for."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model
from vllm_omni.diffusion.data import resolve_model_class_name
from vllm_omni.model_executor.models.omnivoice.omnivoice_decoder import (
    OmniVoiceDecoder,
)
from vllm_omni.transformers_utils.configs.omnivoice import OmniVoiceConfig

from tests.families.omnivoice.written import write_omnivoice_checkpoint
from tests.tiny_files import contents
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.families.omnivoice.texts import CONTROL_TOKENS
from vllm_tts_cache.families.omnivoice.tiny import sizes
from vllm_tts_cache.families.omnivoice.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.tiny_checkpoint import MARKER

RELEASED_LAYOUT = {
    "audio_tokenizer/config.json",
    "audio_tokenizer/model.safetensors",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def read_config(directory):
    return json.loads((directory / "config.json").read_text())


def test_it_has_the_released_files_and_says_that_it_is_no_model(omnivoice_checkpoint):
    files = contents(omnivoice_checkpoint)
    assert set(files) == RELEASED_LAYOUT | {"README.txt", MARKER}
    assert files["README.txt"].startswith(b"Random weights, not a model.")


def test_the_seed_changes_the_model_and_the_tokenizer(omnivoice_checkpoint, tmp_path):
    other = write_omnivoice_checkpoint(tmp_path / "other", CheckpointOptions(seed=1))
    one, two = contents(omnivoice_checkpoint), contents(other)
    changed = {name for name in one if one[name] != two[name]}
    weights = {name for name in RELEASED_LAYOUT if name.endswith(".safetensors")}
    assert changed == weights | {MARKER}


def test_an_impossible_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="encoders"):
        CheckpointOptions(encoders="huge")  # pyright: ignore[reportArgumentType]


def test_the_language_model_has_qwens_weights_and_no_other(omnivoice_checkpoint):
    """As the official class holds them: below ``llm``, and what codes are spoken by."""
    weights = load_file(omnivoice_checkpoint / "model.safetensors")
    config = Qwen3Config(**read_config(omnivoice_checkpoint)["llm_config"])
    with torch.device("meta"):
        expected = Qwen3Model(config).state_dict()
    found = {n: tuple(t.shape) for n, t in weights.items()}
    num_audio = sizes.NUM_CODEBOOKS * sizes.AUDIO_VOCAB_SIZE
    assert found == {
        **{f"llm.{name}": tuple(t.shape) for name, t in expected.items()},
        "audio_embeddings.weight": (num_audio, sizes.LM.hidden),
        "audio_heads.weight": (num_audio, sizes.LM.hidden),
    }


def test_the_host_takes_it_for_omnivoice_and_reads_the_config_as_written(
    omnivoice_checkpoint,
):
    assert resolve_model_class_name(str(omnivoice_checkpoint)) in FAMILY.pipelines
    assert FAMILY.recognises(omnivoice_checkpoint)
    config = OmniVoiceConfig(**read_config(omnivoice_checkpoint))
    assert config.llm_hidden_size == sizes.LM.hidden
    assert config.llm_num_hidden_layers == sizes.LM.num_layers
    assert config.llm_num_key_value_heads == sizes.LM.num_kv_heads
    assert config.llm_head_dim == sizes.LM.head_dim
    assert config.num_audio_codebook == sizes.NUM_CODEBOOKS
    assert config.audio_mask_id == sizes.MASK_ID < config.llm_vocab_size
    assert config.num_step == sizes.NUM_STEPS


def test_the_hosts_decoder_finds_its_weights_and_tells_codes_apart(
    omnivoice_checkpoint,
):
    decoder = OmniVoiceDecoder(OmniVoiceConfig(**read_config(omnivoice_checkpoint)))
    decoder.load_weights(str(omnivoice_checkpoint), torch.device("cpu"))
    weights = load_file(omnivoice_checkpoint / "audio_tokenizer/model.safetensors")
    assert decoder.acoustic_decoder is not None
    for name, parameter in decoder.acoustic_decoder.named_parameters():
        assert torch.equal(parameter, weights[f"acoustic_decoder.{name}"]), name
    codes = torch.randint(0, 1024, (2, 8, 25), generator=torch.Generator())
    one, other = decoder(codes).flatten(1)
    assert one.shape == (25 * 960,)
    assert 0.003 < one.std() < 0.5 and one.abs().max() < 1.5
    assert abs(torch.cosine_similarity(one, other, dim=0)) < 0.5


@pytest.mark.parametrize(
    "text",
    ["Hello there.", "Grüße, naïve café", "你好, 世界", "many   spaces,\ta tab\n"],
)
def test_host_and_official_package_make_the_same_tokens(omnivoice_checkpoint, text):
    """The one reads the file itself, the other by transformers."""
    host = Tokenizer.from_file(str(omnivoice_checkpoint / "tokenizer.json"))
    official = AutoTokenizer.from_pretrained(omnivoice_checkpoint)
    wrapped = f"<|text_start|>{text}<|text_end|>"
    ids = host.encode(wrapped).ids
    assert ids == official(wrapped).input_ids
    assert len(ids) == len(text.encode()) + 2
    assert max(ids) < sizes.VOCAB_SIZE
    for token in CONTROL_TOKENS:
        assert len(host.encode(token).ids) == 1
