"""The tiny checkpoint: what official package and host read, and what it is good for."""

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer
from vllm_omni.config.config_factory import StageConfigFactory
from vllm_omni.model_executor.models.voxcpm2.voxcpm2_talker import (
    build_cjk_split_map,
    split_multichar_chinese,
)
from vllm_omni.transformers_utils.configs.voxcpm2 import VoxCPM2Config
from voxcpm.model.utils import mask_multichar_chinese_tokens
from voxcpm.model.voxcpm2 import VoxCPM2Model, VoxCPMConfig
from voxcpm.modules.audiovae import AudioVAEConfigV2, AudioVAEV2

from tests.families.voxcpm2.written import write_voxcpm2_checkpoint
from tests.tiny_files import contents
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.families.voxcpm2.tiny import sizes
from vllm_tts_cache.families.voxcpm2.tiny.audio_vae_weights import add_audio_vae
from vllm_tts_cache.families.voxcpm2.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH
from vllm_tts_cache.testing.tiny_checkpoint import MARKER
from vllm_tts_cache.testing.weights import WeightBuilder

RELEASED_LAYOUT = {
    "audiovae.pth",
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def read_config(directory):
    return json.loads((directory / "config.json").read_text())


# The files


def test_it_has_the_released_files_and_says_that_it_is_no_model(voxcpm2_checkpoint):
    files = contents(voxcpm2_checkpoint)
    assert set(files) == RELEASED_LAYOUT | {"README.txt", MARKER}
    assert files["README.txt"].startswith(b"Random weights, not a model.")


def test_the_seed_changes_the_model_and_the_audio_vae(voxcpm2_checkpoint, tmp_path):
    other = write_voxcpm2_checkpoint(tmp_path / "other", CheckpointOptions(seed=1))
    one, two = contents(voxcpm2_checkpoint), contents(other)
    changed = {name for name in one if one[name] != two[name]}
    assert changed == {"model.safetensors", "audiovae.pth", MARKER}


def test_an_impossible_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="encoders"):
        CheckpointOptions(encoders="huge")  # pyright: ignore[reportArgumentType]


# What reads them


def official_on_meta(directory) -> VoxCPM2Model:
    """Only names and shapes: the official class loads whatever fits, and no more."""
    config = VoxCPMConfig.model_validate(read_config(directory))
    assert config.audio_vae_config is not None
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.device("meta"):
        vae = AudioVAEV2(config.audio_vae_config)
        return VoxCPM2Model(config, tokenizer, vae, device="cpu")


def test_the_official_class_finds_every_weight_that_it_has_and_no_other(
    voxcpm2_checkpoint,
):
    weights = load_file(voxcpm2_checkpoint / "model.safetensors")
    vae = torch.load(voxcpm2_checkpoint / "audiovae.pth")["state_dict"]
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    assert {t.dtype for t in vae.values()} == {torch.float32, torch.int32}
    whole = weights | {f"audio_vae.{name}": tensor for name, tensor in vae.items()}
    official_on_meta(voxcpm2_checkpoint).load_state_dict(
        whole, strict=True, assign=True
    )


class Shapes(WeightBuilder):
    """Draws nothing, so that the released sizes cost nothing."""

    def under(self, prefix):
        return Shapes(self._seed, f"{self._prefix}{prefix}.", self.tensors)

    def normal(self, name, shape, std):
        return self._add(name, torch.empty(tuple(shape), device="meta"))

    def fill(self, name, shape, value):
        return self._add(name, torch.empty(tuple(shape), device="meta"))


def test_a_real_encoder_has_the_released_names_and_shapes():
    """Which are those of the official defaults."""
    real = Shapes(0)
    add_audio_vae(real, sizes.ENCODER_DIM["real"])
    with torch.device("meta"):
        expected = AudioVAEV2(AudioVAEConfigV2()).state_dict()
    found, wanted = (
        {n: tuple(t.shape) for n, t in tensors.items() if n.startswith("encoder.")}
        for tensors in (real.tensors, expected)
    )
    assert found == wanted
    assert sum(np.prod(shape) for shape in found.values()) == pytest.approx(
        48.4e6, 0.01
    )


def test_the_host_takes_it_for_voxcpm2_and_reads_the_config_as_written(
    voxcpm2_checkpoint,
):
    inferred = StageConfigFactory.try_infer_model_type(str(voxcpm2_checkpoint), False)
    assert inferred == "voxcpm2"
    assert FAMILY.recognises(voxcpm2_checkpoint)
    config = VoxCPM2Config(**read_config(voxcpm2_checkpoint))
    assert config.hidden_size == sizes.LM.hidden
    assert config.num_hidden_layers == sizes.LM.num_layers
    assert config.head_dim == sizes.LM.head_dim
    assert config.max_position_embeddings == sizes.MAX_POSITIONS
    assert config.audio_vae_config["sample_rate"] == 16_000


@pytest.mark.parametrize(
    "text",
    [
        "Hello there.",
        "One, two; 42!",
        "Grüße, naïve café \N{THUMBS UP SIGN}",
        "你好, 世界. 你 好!",
        "many   spaces,\ta tab\n",
    ],
)
def test_host_and_official_package_make_the_same_tokens(voxcpm2_checkpoint, text):
    """The one counts how long a prompt is, and the other makes it."""
    tokenizer = AutoTokenizer.from_pretrained(voxcpm2_checkpoint)
    split_map = build_cjk_split_map(tokenizer)
    ids = split_multichar_chinese(tokenizer.encode(text), split_map)
    assert len(split_map) == 2
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids[1:] == mask_multichar_chinese_tokens(tokenizer)(text)
    assert tokenizer.unk_token_id not in ids
    assert not set(range(3, 105)) & set(ids)  # what controls the model
    assert tokenizer.decode(ids[1:]) == text


# What it speaks


@pytest.fixture(scope="module")
def model(voxcpm2_checkpoint) -> VoxCPM2Model:
    return VoxCPM2Model.from_local(
        str(voxcpm2_checkpoint), optimize=False, device="cpu"
    )


def speak(model, text, clip, mode, *, num_patches=None):
    torch.manual_seed(0)
    lengths = {"min_len": 0, "max_len": 40}
    if num_patches is not None:
        lengths = {"min_len": num_patches, "max_len": num_patches}
    reference = {
        "reference": {"reference_wav_path": str(clip.path)},
        "continuation": {
            "prompt_wav_path": str(clip.path),
            "prompt_text": clip.transcript,
        },
    }[mode]
    return model.generate(text, **reference, **lengths)[0]


def test_another_voice_text_or_mode_is_heard_and_nothing_is_clipped(model):
    assert model.sample_rate == FAMILY.sample_rate_hz
    texts, modes = ("Hello there.", "It rains."), ("reference", "continuation")
    spoken = [
        speak(model, *what, num_patches=5)
        for what in itertools.product(texts, (SPEECH, OTHER_SPEECH), modes)
    ]
    for samples in spoken:
        assert samples.shape == (5 * 4 * 1_920,)
        assert 0.03 < samples.std() < 0.3
        assert samples.abs().max() < 1
    for one, other in itertools.combinations(spoken, 2):
        assert abs(cosine_similarity(one, other, dim=0)) < 0.5


def test_a_speech_ends_by_chance_and_soon(model):
    num_patches = [
        len(speak(model, text, clip, mode)) // (4 * 1_920)
        for text in ("Hello there.", "It rains.")
        for clip in (SPEECH, OTHER_SPEECH)
        for mode in ("reference", "continuation")
    ]
    assert len(set(num_patches)) > 3
    assert 2 < np.median(num_patches) < 30
