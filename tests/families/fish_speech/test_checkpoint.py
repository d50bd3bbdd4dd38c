import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.families.fish_speech.written import write_fish_speech_checkpoint
from tests.tiny_files import contents
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.fish_speech.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.tiny_checkpoint import MARKER

RELEASED_LAYOUT = {
    "codec.pth",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def tokenizer(fish_speech_checkpoint):
    return Tokenizer.from_file(str(fish_speech_checkpoint / "tokenizer.json"))


def test_it_has_the_released_files_and_says_that_it_is_no_model(fish_speech_checkpoint):
    files = contents(fish_speech_checkpoint)
    assert set(files) == RELEASED_LAYOUT | {"codec.json", "README.txt", MARKER}
    assert files["README.txt"].startswith(b"Random weights, not a model.")


def test_the_seed_changes_the_model_and_the_codec(fish_speech_checkpoint, tmp_path):
    other = write_fish_speech_checkpoint(tmp_path / "o", CheckpointOptions(seed=1))
    one, two = contents(fish_speech_checkpoint), contents(other)
    changed = {name for name in one if one[name] != two[name]}
    assert changed == {"model.safetensors", "codec.pth", MARKER}


def test_the_language_models_are_bfloat16_and_the_codec_float32(fish_speech_checkpoint):
    weights = load_file(fish_speech_checkpoint / "model.safetensors")
    codec = torch.load(fish_speech_checkpoint / "codec.pth")["generator"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in codec.values()} == {torch.float32}
    assert weights["text_model.model.embeddings.weight"].shape == (155_776, 256)


def test_control_and_semantic_tokens_have_their_released_ids(tokenizer):
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 155_776
    assert tokenizer.token_to_id("<|im_end|>") == 151_645
    assert tokenizer.token_to_id("<|semantic:0|>") == 151_678
    assert tokenizer.token_to_id("<|semantic:4095|>") == 155_773
    encoded = tokenizer.encode("<|im_start|>a<|speaker:7|><|voice|><|semantic:9|>")
    assert encoded.ids == [151_644, 64, 151_657, 151_673, 151_687]


def test_any_text_comes_back_from_its_tokens(tokenizer):
    text = "Grüße, 你好 and 42!\n"
    encoded = tokenizer.encode(text)
    assert len(encoded.ids) == len(text.encode())
    assert tokenizer.decode(encoded.ids) == text


def test_the_configs_end_a_speech_by_the_token_that_the_tokenizer_has(
    fish_speech_checkpoint, tokenizer
):
    config = json.loads((fish_speech_checkpoint / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert config["audio_pad_token_id"] == tokenizer.token_to_id("<|audio_pad|>")


def test_an_impossible_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="encoders"):
        CheckpointOptions(encoders="huge")  # pyright: ignore[reportArgumentType]


def test_only_ours_is_replaced_and_with_force_only(tmp_path):
    (tmp_path / "thesis.txt").write_text("three years of work")
    with pytest.raises(ConfigError, match="left alone"):
        write_fish_speech_checkpoint(tmp_path, force=True)
    out = write_fish_speech_checkpoint(tmp_path / "out")
    (out / "stale").write_text("from the run before")
    with pytest.raises(ConfigError, match="--force"):
        write_fish_speech_checkpoint(out)
    write_fish_speech_checkpoint(out, force=True)
    assert set(contents(out)) > RELEASED_LAYOUT
    assert not (out / "stale").exists()
