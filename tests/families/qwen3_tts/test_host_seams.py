"""What our Qwen3-TTS hooks into is there in the installed host."""

import ast
import inspect

import pytest

from tests.host_source import (
    ADAPTERS,
    FUNCTIONS,
    code_of,
    definition,
    method_in,
    parameters,
    source,
    tree_of,
)
from vllm_tts_cache.families.qwen3_tts.family import FAMILY

SERVING = "entrypoints/openai/serving_speech.py"
TALKER = "model_executor/models/qwen3_tts/qwen3_tts_talker.py"
TALKER_CLASS = "Qwen3TTSTalkerForConditionalGeneration"


def test_seam_model_registry_a_class_is_replaced_under_its_name():
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    given = list(inspect.signature(OmniModelRegistry.register_model).parameters)
    assert given == ["model_arch", "model_cls"], "OmniModelRegistry.register_model"
    known = OmniModelRegistry.get_supported_archs()
    assert "Qwen3TTSTalkerForConditionalGeneration" in known, "the talker's name"


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("build", ["request", "sampling_params_list", "has_inline_ref_audio"]),
        ("_build_tts_params", ["request"]),
        ("_estimate_prompt_len", ["tts_params"]),
    ],
)
def test_seam_adapter_has_what_ours_builds_on(name, takes):
    method = method_in(f"{ADAPTERS}/qwen3_tts.py", "Qwen3TTSAdapter", name)
    assert parameters(method) == takes, f"Qwen3TTSAdapter.{name}"


@pytest.mark.parametrize("path", ["qwen3_tts", "fish_speech"])
def test_seam_adapter_is_validated_and_then_built_by_whoever_prepares(path):
    """A request that names a speaker is resolved and validated in `build`."""
    body = source(SERVING, "OmniOpenAIServingSpeech", "_prepare_speech_generation")
    validated = body.index("adapter.validate(request)")
    assert validated < body.index("await adapter.build(request"), "their order"
    name = {"qwen3_tts": "Qwen3TTSAdapter", "fish_speech": "FishSpeechAdapter"}[path]
    for method in ("validate", "build"):
        method_in(f"{ADAPTERS}/{path}.py", name, method)


def test_seam_adapter_registry_is_a_dict_of_classes_by_name():
    from vllm_omni.entrypoints.openai import tts_adapters

    registry = tts_adapters.TTS_ADAPTER_REGISTRY
    assert isinstance(registry, dict), "TTS_ADAPTER_REGISTRY"
    assert "qwen3_tts" in registry, "qwen3_tts is not in TTS_ADAPTER_REGISTRY"
    assert registry["qwen3_tts"].name == "qwen3_tts"


def test_seam_adapter_estimates_in_a_thread_under_this_name():
    body = source(f"{ADAPTERS}/qwen3_tts.py", "Qwen3TTSAdapter", "__init__")
    assert "self._estimate_prompt_len_async" in body, "_estimate_prompt_len_async"


def test_seam_adapter_salts_the_prefix_cache_by_the_reference():
    function = definition(
        tree_of(f"{ADAPTERS}/base.py").body, "conditioning_cache_salt", FUNCTIONS
    )
    assert function is not None, "conditioning_cache_salt is gone"
    assert parameters(function) == ["request", "tts_params"]
    assert "ref_audio_cache_key" in ast.unparse(function), "the salt forgot the audio"


def test_seam_adapter_takes_the_announced_length_of_the_codes():
    builder = "model_executor/models/qwen3_tts/prompt_embeds_builder.py"
    name = "estimate_prompt_len_from_additional_information"
    body = source(builder, "Qwen3TTSPromptEmbedsBuilder", name)
    assert "ref_code_length" in body, "ref_code_length is not read any more"


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("__init__", ["vllm_config", "prefix"]),
        ("load_weights", ["weights"]),
        ("preprocess", ["input_ids", "input_embeds"]),
        ("compute_logits", ["hidden_states", "sampling_metadata"]),
        ("set_batch_req_ids", ["req_ids"]),
        ("mrv2_sampling_context", ["req_ids", "num_output_tokens"]),
    ],
)
def test_seam_talker_has_the_methods_that_ours_overrides_or_needs(name, takes):
    assert parameters(method_in(TALKER, TALKER_CLASS, name)) == takes, f"talker.{name}"


@pytest.mark.parametrize(
    "name",
    [
        "_batch_req_ids",
        "_use_v2_model_runner",
        "_tts_pad_embed",
        "_embedding_dtype",
        "talker_config",
        "logitsprocs_need_output_token_ids",
    ],
)
def test_seam_talker_has_the_fields_that_ours_uses(name):
    body = source(TALKER, TALKER_CLASS, "__init__")
    assert f"self.{name}" in body or f"'{name}'" in body, f"talker.{name} is gone"


def test_seam_talker_reads_a_voice_clone_prompt():
    builder = "model_executor/models/qwen3_tts/prompt_embeds_builder.py"
    body = source(builder, "Qwen3TTSPromptEmbedsBuilder", "build_prompt_embeds")
    for name in ("voice_clone_prompt", "ref_spk_embedding", "ref_code", "icl_mode"):
        assert f"'{name}'" in body, f"build_prompt_embeds does not read {name}"


def test_seam_codec_mask_forbids_the_id_that_ends_a_request_without_a_prompt():
    from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import (
        Qwen3TTSTalkerConfig,
    )

    config = Qwen3TTSTalkerConfig()
    assert FAMILY.failure_id == config.vocab_size - 1, "the talker's vocabulary grew"
    assert config.code_predictor_config.vocab_size == 2048, "codes per codebook"
    body = source(TALKER, TALKER_CLASS, "compute_logits")
    assert "masked_fill(self._codec_disallowed_mask, float('-inf'))" in body, (
        "the codec mask is not applied in compute_logits any more"
    )
    mask = source(TALKER, TALKER_CLASS, "__init__")
    allowed = "min(self._codebook_vocab_size, vocab)"
    assert allowed in mask, "the mask allows other ids than codes and the end"


def test_seam_runner_v2_says_it_only_to_models_that_need_output_token_ids():
    body = code_of("worker_v2/omni_ar_model_runner.py")
    assert "getattr(self.model, 'mrv2_sampling_context', None)" in body
    assert "getattr(self.model, 'logitsprocs_need_output_token_ids', False)" in body, (
        "another condition decides who is told; CachedQwen3TTSTalker.__init__ sets this"
    )
    assert "self.set_batch_req_ids(req_ids)" in source(
        TALKER, TALKER_CLASS, "mrv2_sampling_context"
    )
