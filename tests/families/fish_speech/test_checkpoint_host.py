"""The Fish Speech test checkpoint fits the host's classes, and does its job."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model
from vllm_omni.model_executor.models.fish_speech.configuration_fish_speech import (
    FishSpeechConfig,
)
from vllm_omni.model_executor.models.fish_speech.dac_utils import build_dac_codec
from vllm_omni.model_executor.models.fish_speech.fish_speech_slow_ar import (
    _remap_fish_speech_weights,
)
from vllm_omni.model_executor.models.fish_speech.prompt_utils import (
    build_fish_text_only_prompt_ids,
    build_fish_voice_clone_prompt_ids,
)

from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.fish_speech.codec import build_codec, read_sizes
from vllm_tts_cache.families.fish_speech.encoders import load_reference_encoders
from vllm_tts_cache.families.fish_speech.tiny import sizes
from vllm_tts_cache.families.fish_speech.tiny.codec_weights import add_codec
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH
from vllm_tts_cache.testing.weights import WeightBuilder

FIRST_SEMANTIC_ID, IM_END = 151_678, 151_645
COMPUTED = ("freqs_cis", "causal_mask")


class Shapes(WeightBuilder):
    """Draws nothing, so that the released sizes cost nothing."""

    def under(self, prefix):
        return Shapes(self._seed, f"{self._prefix}{prefix}.", self.tensors)

    def normal(self, name, shape, std):
        return self._add(name, torch.empty(tuple(shape), device="meta"))

    def fill(self, name, shape, value):
        return self._add(name, torch.empty(tuple(shape), device="meta"))


def shapes_of(tensors):
    return {n: tuple(t.shape) for n, t in tensors.items() if not n.endswith(COMPUTED)}


def codes_of(checkpoint, clip):
    encoder = load_reference_encoders(checkpoint, torch.device("cpu"))["codec"]
    return encoder.encode(decode_path(clip.path).audio)["codes"]


@pytest.fixture(scope="module")
def config(fish_speech_checkpoint):
    return FishSpeechConfig.from_pretrained(fish_speech_checkpoint)


@pytest.fixture(scope="module")
def codes(fish_speech_checkpoint):
    return [codes_of(fish_speech_checkpoint, clip) for clip in (SPEECH, OTHER_SPEECH)]


@pytest.fixture(scope="module")
def tokenizer(fish_speech_checkpoint):
    return AutoTokenizer.from_pretrained(fish_speech_checkpoint)


def test_the_real_codec_has_the_names_and_shapes_that_the_host_expects():
    real = Shapes(0)
    add_codec(real, sizes.CODEC["real"])
    with torch.device("meta"):
        expected = build_dac_codec().state_dict()
    assert shapes_of(real.tensors) == shapes_of(expected)
    assert sum(tensor.numel() for tensor in real.tensors.values()) > 390e6


def test_the_config_reads_in_the_hosts_class_as_it_was_written(config):
    assert config.text_config.hidden_size == sizes.SLOW_AR.hidden
    assert config.text_config.vocab_size == sizes.VOCAB_SIZE
    assert config.text_config.semantic_begin_id == FIRST_SEMANTIC_ID
    assert config.audio_decoder_config.num_hidden_layers == sizes.FAST_AR.num_layers
    assert config.audio_decoder_config.max_position_embeddings == 11


def test_the_hosts_prompts_find_every_control_token(tokenizer):
    semantic = [FIRST_SEMANTIC_ID, FIRST_SEMANTIC_ID + 4_095]
    cloned, *_ = build_fish_voice_clone_prompt_ids(tokenizer, "Hi.", "Ho.", semantic)
    plain, _ = build_fish_text_only_prompt_ids(tokenizer, "Hi.")
    for prompt in (cloned, plain):
        assert prompt.count(IM_END) == 2
        assert prompt[-1] == tokenizer.convert_tokens_to_ids("<|voice|>")
    assert tokenizer.convert_tokens_to_ids("<|speaker:0|>") in cloned
    assert tokenizer.convert_ids_to_tokens(semantic[-1]) == "<|semantic:4095|>"


def test_two_clips_share_hardly_a_code_and_each_uses_many(codes):
    one, other = codes
    num_frames = min(len(one), len(other))
    assert (one[:num_frames] == other[:num_frames]).mean() < 0.05
    assert all(len(np.unique(book)) > 0.5 * len(one) for book in one.T)


def test_what_the_codec_speaks_is_audible_not_clipped_and_told_by_its_codes(
    fish_speech_checkpoint, codes
):
    codec = build_codec(read_sizes(fish_speech_checkpoint)).eval()
    state = torch.load(fish_speech_checkpoint / "codec.pth")["generator"]
    assert not codec.load_state_dict(state, strict=False).unexpected_keys
    spoken = [decode(codec, given[:40]) for given in codes]
    for samples in spoken:
        assert 0.03 < samples.std() < 0.3
        assert samples.abs().max() < 1
    assert abs(cosine_similarity(spoken[0], spoken[1], dim=0)) < 0.5


@torch.no_grad()
def decode(codec, codes):
    indices = torch.from_numpy(codes.T.astype(np.int64))[None]
    samples, _ = codec.decode(indices, torch.tensor([len(codes)]))
    return samples.flatten()


@pytest.fixture(scope="module")
def language_model(fish_speech_checkpoint, config):
    """The slow model by another implementation, and the codes' embeddings."""
    text = config.text_config
    given = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    given += ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    model = Qwen3Model(
        Qwen3Config(
            **{name: getattr(text, name) for name in given},
            rope_parameters={"rope_type": "default", "rope_theta": text.rope_theta},
        )
    ).eval()
    heads = (sizes.SLOW_AR.num_heads, sizes.SLOW_AR.num_kv_heads, 64)
    weights = load_file(fish_speech_checkpoint / "model.safetensors").items()
    mapped = dict(_remap_fish_speech_weights(weights, *heads, *heads))
    slow = {
        name.removeprefix("model."): tensor.float()
        for name, tensor in mapped.items()
        if name.startswith("model.")
    }
    model.load_state_dict(slow)
    return model, mapped["codebook_embeddings.weight"].float()


def test_the_fast_model_has_what_the_host_looks_for(fish_speech_checkpoint):
    with safe_open(fish_speech_checkpoint / "model.safetensors", "pt") as file:
        names = [n for n in file.keys() if n.startswith("audio_decoder.")]  # noqa: SIM118
    weights = ((name, torch.zeros(512, 1)) for name in names)
    mapped = dict(_remap_fish_speech_weights(weights, 4, 2, 64, 4, 2, 64))
    layer = "fast_ar.model.layers.1"
    for name in (
        "codebook_embeddings.weight",
        "fast_ar.fast_embeddings.weight",
        "fast_ar.fast_output.weight",
        "fast_ar.fast_norm.weight",
        f"{layer}.self_attn.q_proj.weight",
        f"{layer}.mlp.gate_proj.weight",
        f"{layer}.input_layernorm.weight",
    ):
        assert name in mapped


@torch.no_grad()
def first_code_probabilities(language_model, tokenizer, text, codes):
    """Over the semantic codes that may come first; the prompt is the host's."""
    model, codebooks = language_model
    semantic = (codes[:, 0] + np.int32(FIRST_SEMANTIC_ID)).tolist()
    ids, *_ = build_fish_voice_clone_prompt_ids(
        tokenizer, text, "What was said in it.", semantic
    )
    embedded = model.embed_tokens(torch.tensor(ids))
    start = ids.index(semantic[0])
    rows = torch.from_numpy(codes.astype(np.int64)) + torch.arange(10) * 4_096
    embedded[start : start + len(codes)] += codebooks[rows].sum(1)
    hidden = model(inputs_embeds=embedded[None]).last_hidden_state[0, -1]
    semantic_rows = model.embed_tokens.weight[FIRST_SEMANTIC_ID:][:4_096]
    return (semantic_rows @ hidden).softmax(0)


def test_another_text_or_another_voice_makes_other_codes_likely(
    language_model, tokenizer, codes
):
    probabilities = [
        first_code_probabilities(language_model, tokenizer, text, voice)
        for text in ("Hello there.", "The keeper counts the ships.")
        for voice in codes
    ]
    for index, one in enumerate(probabilities):
        for other in probabilities[:index]:
            distance = (one - other).abs().sum() / 2  # total variation
            assert distance > 0.3
