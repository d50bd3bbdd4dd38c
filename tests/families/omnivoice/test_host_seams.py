"""What our OmniVoice pipeline hooks into is there in the installed host."""

import pytest

from tests.host_source import calls_in, method_in, parameters, source
from vllm_tts_cache.families.omnivoice.family import FAMILY

PIPELINE = "diffusion/models/omnivoice/pipeline_omnivoice.py"
CLASS = "OmniVoicePipeline"


def test_seam_registry_what_comes_after_the_pipeline_is_looked_up_in_our_module():
    from vllm_omni.diffusion import registry

    from vllm_tts_cache.families.omnivoice import worker

    assert CLASS in FAMILY.pipelines
    assert hasattr(worker, registry._DIFFUSION_POST_PROCESS_FUNCS[CLASS])


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("_prepare_request_input", ["prompt", "extra"]),
        ("_encode_ref_audio", ["audio_signal", "sr"]),
        ("forward", ["req"]),
        ("prepare_encode", ["state"]),
        ("post_decode", ["state"]),
        ("load_weights", ["weights"]),
    ],
)
def test_seam_pipeline_has_the_methods_that_we_override(name, takes):
    assert parameters(method_in(PIPELINE, CLASS, name)) == takes


@pytest.mark.parametrize("name", ["forward", "prepare_encode"])
def test_seam_pipeline_prepares_each_request_once_and_takes_an_error_for_an_answer(
    name,
):
    prepared = "self._prepare_request_input"
    assert len(calls_in(PIPELINE, CLASS, name, prepared)) == 1
    body = source(PIPELINE, CLASS, name)
    assert "isinstance(prepared, DiffusionOutput)" in body


def test_seam_pipeline_a_reference_goes_through_the_one_method_that_encodes():
    body = source(PIPELINE, CLASS, "_prepare_request_input")
    assert "audio_signal, sr = ref_audio" in body
    assert "self._encode_ref_audio(audio_signal, int(sr))" in body
    assert "if voice_name:" in body
