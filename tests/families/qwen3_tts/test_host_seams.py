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
CODE2WAV = "model_executor/models/qwen3_tts/qwen3_tts_code2wav.py"
CODE2WAV_CLASS = "Qwen3TTSCode2Wav"
DECODER = (
    "model_executor/models/qwen3_tts/tokenizer_12hz/modeling_qwen3_tts_tokenizer_v2.py"
)
DECODER_CLASS = "Qwen3TTSTokenizerV2Decoder"
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
    assert "ref_audio_cache_key" in ast.unparse(function), "the salt lacks the audio"


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


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("load_weights", ["weights"]),
        (
            "forward",
            [
                "input_ids",
                "positions",
                "intermediate_tensors",
                "inputs_embeds",
                "runtime_additional_information",
                "model_intermediate_buffer",
            ],
        ),
        ("_split_request_ids", ["ids", "seq_token_counts"]),
        ("on_requests_finished", ["finished_req_ids"]),
    ],
)
def test_seam_code2wav_has_what_ours_overrides_or_calls(name, takes):
    assert parameters(method_in(CODE2WAV, CODE2WAV_CLASS, name)) == takes, name


@pytest.mark.parametrize(
    "name",
    [
        "_async_chunk",
        "_num_quantizers",
        "_decoder_state_cache: dict[str, dict[str, Any]]",
        "decoder",
    ],
)
def test_seam_code2wav_has_the_fields_that_ours_uses(name):
    assert f"self.{name} = " in source(CODE2WAV, CODE2WAV_CLASS, "__init__"), name


def test_seam_code2wav_finds_ids_and_references_where_ours_does():
    body = source(CODE2WAV, CODE2WAV_CLASS, "forward")
    for name in ("request_ids", "seq_token_counts"):
        assert f"kwargs.get('{name}')" in body, f"{name} comes otherwise"
    for name in ("request_id", "ref_context_size", "ref_context_included"):
        assert f"meta['{name}']" in body, f"meta.{name} is not read any more"
    # What the runner says goes before what comes with the request.
    theirs = body.index("cache_request_ids = request_state_ids.copy()")
    assert theirs < body.index("cache_request_ids[i] = str(request_id)")
    assert "state_req_id.startswith(_DUMMY_REQUEST_ID)" in body, "dummy runs"
    assert "state_req_id not in self._decoder_state_cache" in body, "a first chunk"
    assert "decoder.batched_chunked_decode(" in body, "what decodes a step"
    assert "codes.get('audio')" in code_of(CODE2WAV), "codes beside the ids"


def test_seam_a_dummy_run_says_ids_in_what_comes_with_a_request_alone():
    path = "worker/gpu_generation_model_runner.py"
    dummy = source(path, "GPUGenerationModelRunner", "_dummy_run")
    assert "get_dummy_runtime_additional_information(num_reqs)" in dummy
    assert "request_ids" not in dummy, "it says them now; nothing is to be done"
    assert "model_kwargs['request_ids'] = list(req_ids)" in code_of(path)


def test_seam_the_decoder_has_what_ours_takes_the_place_of():
    takes = parameters(method_in(DECODER, DECODER_CLASS, "batched_chunked_decode"))
    assert takes[:3] == ["codes", "lengths", "caches"] and takes[-1] == "max_batch_size"
    body = source(DECODER, DECODER_CLASS, "batched_chunked_decode")
    # Where it replays CUDA graphs nothing is ours.
    assert "if self._cudagraph_enabled and" in body
    assert "return [output[0] for output in outputs]" in body, "(1, num_samples) each"
    assert parameters(method_in(DECODER, DECODER_CLASS, "_batch_dynamic_caches"))
    enabled = source(DECODER, DECODER_CLASS, "enable_cudagraph")
    assert "self._cudagraph_enabled = True" in enabled
    loaded = source(CODE2WAV, CODE2WAV_CLASS, "load_weights")
    assert "_maybe_enable_decoder_cudagraph(" in loaded, "it is known once it is loaded"


@pytest.mark.parametrize(
    "name",
    [
        "prefix_frames",
        "decoder_prefix_frames",
        "prefix_pad_frames",
        "ref_hidden",
        "ref_conv",
        "prefix_hidden",
        "past_key_values",
        "suffix_quantized",
        "suffix_conv",
        "suffix_frames",
    ],
)
def test_seam_the_decoder_remembers_a_request_under_these_names(name):
    methods = ("decode_suffix", "_decode_suffix", "batched_request_decode")
    read = "".join(source(DECODER, DECODER_CLASS, method) for method in methods)
    assert f"'{name}'" in read, f"caches[{name!r}] is not read any more"


def test_seam_the_decoder_gives_its_convolutions_as_many_earlier_frames():
    body = source(DECODER, DECODER_CLASS, "_decode_suffix")
    assert "new_frames + _DOWNSTREAM_CONTEXT_FRAME" in body
    assert "[:, :, -_CONV_CONTEXT_FRAME:]" in body
    assert "[:, -(suffix_cache_length - _CONV_CONTEXT_FRAME):, :]" in body
    conv = code_of(DECODER)
    for name in ("CausalConvNet", "CausalTransConvNet"):
        assert f"class Qwen3TTSTokenizerV2{name}(nn.Module)" in conv
    assert "self.padding = self.kernel_size - self.stride" in conv
    assert "self.right_pad = int(pad)" in conv
