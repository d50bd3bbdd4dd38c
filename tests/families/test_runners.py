"""A talker that an engine so set up would leave voiceless says so at start."""

from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.families.cosyvoice3.family import FAMILY as COSYVOICE3
from vllm_tts_cache.model_executor.talker import SamplingTalker, refuse_prefix_caching
from vllm_tts_cache.speaker.family import families

STAGE = "cosyvoice3_talker"
REFUSING = [family for family in families() if family.needs_first_runner]


def config(*, is_prefix_caching=False, model_stage="", **model):
    return SimpleNamespace(
        model_config=SimpleNamespace(model_stage=model_stage, **model),
        cache_config=SimpleNamespace(enable_prefix_caching=is_prefix_caching),
    )


def test_they_are_those_that_the_other_runner_asks_too_little_of():
    for family in families():
        talkers = [resolve_name(path) for path in family.models.values()]
        if any(issubclass(talker, SamplingTalker) for talker in talkers):
            assert family.needs_first_runner


@pytest.mark.parametrize("family", REFUSING, ids=lambda family: family.name)
def test_the_second_runner_is_refused_by_the_name_of_its_setting(family, plugin_log):
    for path in set(family.models.values()):
        with pytest.raises(ConfigError, match=f"{family.title} .* model_runner: v1"):
            resolve_name(path)(vllm_config=config(use_v2_model_runner=True))
    (line,) = plugin_log.messages
    assert "model_runner: v1" in line and "\n" not in line


@pytest.mark.parametrize("name", ["cosyvoice3", "voxcpm2"])
def test_prefix_caching_is_refused_for_it_would_mix_up_voices(name, plugin_log):
    (family,) = (family for family in families() if family.name == name)
    (talker,) = map(resolve_name, family.models.values())
    with pytest.raises(ConfigError, match="enable_prefix_caching: false"):
        talker(vllm_config=config(is_prefix_caching=True, model_stage=STAGE))
    refuse_prefix_caching(config(), family)
    (line,) = plugin_log.messages
    assert "enable_prefix_caching" in line and "\n" not in line


def test_a_mode_of_0_32_is_refused_for_it_draws_the_id_of_failures():
    mode = SimpleNamespace(cosyvoice3_sampling_mode="standard")
    (talker,) = map(resolve_name, COSYVOICE3.models.values())
    with pytest.raises(ConfigError, match="cosyvoice3_sampling_mode"):
        talker(vllm_config=config(model_stage=STAGE, hf_config=mode))
