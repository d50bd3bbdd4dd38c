"""Which engines wait for their outputs, by what the host itself asks."""

import pytest
from vllm_omni.engine import omni_engine_base
from vllm_omni.engine.orchestrator import _event_driven_orch_enabled

from tests.families.cases import every_case
from vllm_tts_cache.entrypoints import event_driven


@pytest.fixture
def is_default(monkeypatch):
    name = event_driven._NAME
    monkeypatch.setattr(omni_engine_base, name, getattr(omni_engine_base, name))
    event_driven.install()
    event_driven.install()
    return getattr(omni_engine_base, name)


@every_case
def test_families_whose_tests_run_so_wait(is_default, case):
    if name := case.family.waits_for_outputs_of:
        assert is_default(name)


def test_others_are_as_the_host_has_them(is_default):
    assert is_default("qwen3_tts")
    assert not is_default("bark")
    assert not is_default(None)


def test_the_hosts_variable_has_the_last_word(is_default, monkeypatch):
    monkeypatch.setenv("VLLM_OMNI_EVENT_DRIVEN_ORCH", "0")
    assert not _event_driven_orch_enabled(default=is_default("fish_qwen3_omni"))


@every_case
def test_the_host_calls_its_pipeline_so(case):
    """A name that the host changes would have us wait for nothing."""
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

    if name := case.family.waits_for_outputs_of:
        assert name in OMNI_PIPELINES
