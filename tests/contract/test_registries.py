"""Whichever registry the host asks, and whenever, it is told our class."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.model_loader import utils as loader
from vllm.model_executor.models import ModelRegistry, interfaces
from vllm_omni.engine.arg_utils import OmniEngineArgs
from vllm_omni.model_executor.models.registry import _OMNI_MODELS, OmniModelRegistry

from vllm_tts_cache import plugin
from vllm_tts_cache.speaker.family import families


def replaced(*those):
    return [
        pytest.param(family, architecture, ours, id=f"{family.name}-{architecture}")
        for family in those
        for architecture, ours in {**family.models, **family.decoders}.items()
    ]


REPLACED = replaced(*families())
EARLY = replaced(*(each for each in families() if each.host_is_multimodal))


@pytest.fixture(autouse=True)
def registered():
    """As before each configuration of a stage, where nothing was asked before."""
    loader._MODEL_ARCH_BY_HASH.clear()
    plugin.register()
    args: Any = SimpleNamespace()
    OmniEngineArgs._ensure_omni_models_registered(args)


@pytest.mark.parametrize(("of", "architecture", "ours"), REPLACED)
def test_a_family_says_whether_the_host_takes_audio_there(of, architecture, ours):
    """If it does, vLLM asks for the class before the host can tell it ours."""
    folder, module, name = _OMNI_MODELS[architecture]
    hosts = import_module(f"vllm_omni.model_executor.models.{folder}.{module}")
    is_multimodal = interfaces.supports_multimodal(getattr(hosts, name))
    assert is_multimodal is of.host_is_multimodal


def asked(registry, architecture):
    """The class that a process loads whose configuration has this registry."""
    config: Any = SimpleNamespace(
        model="a checkpoint",
        convert_type="none",
        runner_type="generate",
        trust_remote_code=True,
        model_impl="auto",
        hf_config=SimpleNamespace(architectures=[architecture], model_type=""),
        hf_text_config=SimpleNamespace(),
        registry=registry,
        _get_transformers_backend_cls=lambda: "a backend",
    )
    return loader.get_model_architecture(config)[0]


@pytest.mark.parametrize(("of", "architecture", "ours"), EARLY)
def test_what_was_asked_first_is_what_is_loaded(of, architecture, ours):
    """What vLLM's loader remembers does not tell the registries apart."""
    early, later = (asked(r, architecture) for r in (ModelRegistry, OmniModelRegistry))
    assert early is later
    assert f"{early.__module__}:{early.__name__}" == ours
    assert not interfaces.supports_multimodal(early)
