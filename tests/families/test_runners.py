"""A talker that the host's second runner would leave voiceless says so at start."""

import inspect
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
from vllm_omni.worker_v2 import omni_ar_model_runner, omni_model_runner
from vllm_omni.worker_v2.model_states import omni_model_state

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.model_executor.sampling_talker import SamplingTalker
from vllm_tts_cache.speaker.family import families

NAMES = ("audio8_tts", "cosyvoice3", "higgs_audio_v2", "higgs_audio_v3")
REFUSING = [family for family in families() if family.needs_first_runner]


def test_they_are_those_that_the_other_runner_asks_too_little_of():
    assert tuple(sorted(family.name for family in REFUSING)) == NAMES
    for family in families():
        talkers = [resolve_name(path) for path in family.models.values()]
        if any(issubclass(talker, SamplingTalker) for talker in talkers):
            assert family.needs_first_runner


@pytest.mark.parametrize("family", REFUSING, ids=lambda family: family.name)
def test_the_second_runner_is_refused_by_the_name_of_its_setting(family, plugin_log):
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_v2_model_runner=True, model_stage=""),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )
    for path in set(family.models.values()):
        with pytest.raises(ConfigError, match=f"{family.title} .* model_runner: v1"):
            resolve_name(path)(vllm_config=config)
    (line,) = plugin_log.messages
    assert "model_runner: v1" in line and "\n" not in line


def test_seam_the_second_runner_still_lacks_what_they_are_refused_for():
    modules = omni_model_runner, omni_ar_model_runner, omni_model_state
    runner = "".join(inspect.getsource(module) for module in modules)
    assert "update_decode_step_metadata" not in runner
    assert "model.sample(" not in runner
    assert "preprocess_decode_batch" in runner
