"""A talker that an engine so set up would leave voiceless says so at start."""

from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.model_executor.talker import SamplingTalker, refuse_prefix_caching
from vllm_tts_cache.speaker.family import families

REFUSING = [family for family in families() if family.needs_first_runner]


def test_they_are_those_that_the_other_runner_asks_too_little_of():
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


@pytest.mark.parametrize("name", ["cosyvoice3", "voxcpm2"])
def test_prefix_caching_is_refused_for_it_would_mix_up_voices(name, plugin_log):
    (family,) = (family for family in families() if family.name == name)

    def config(is_on):
        return SimpleNamespace(
            model_config=SimpleNamespace(model_stage="cosyvoice3_talker"),
            cache_config=SimpleNamespace(enable_prefix_caching=is_on),
        )

    (talker,) = map(resolve_name, family.models.values())
    with pytest.raises(ConfigError, match="enable_prefix_caching: false"):
        talker(vllm_config=config(True))
    refuse_prefix_caching(config(False), family)
    (line,) = plugin_log.messages
    assert "enable_prefix_caching" in line and "\n" not in line
