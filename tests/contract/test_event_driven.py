"""Which engines wait for their outputs; that they do is shown on real servers."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_omni.engine import async_omni_engine, orchestrator
from vllm_omni.engine.async_omni_engine import AsyncOmniEngine
from vllm_omni.engine.orchestrator import _event_driven_orch_enabled

from tests.families.cases import every_case
from vllm_tts_cache import patch_once
from vllm_tts_cache.entrypoints.serving import host_fixes

default_for: Any = getattr(
    orchestrator, "_event_driven_orch_default_for_pipeline", None
)
pytestmark = pytest.mark.skipif(default_for is None, reason="0.32 waits by itself")


@pytest.fixture
def waits(monkeypatch):
    """Whether an engine of a pipeline waits, by what the host itself asks."""
    name = "_create_orchestrator"
    monkeypatch.setattr(AsyncOmniEngine, name, getattr(AsyncOmniEngine, name))
    monkeypatch.setattr(async_omni_engine, "Orchestrator", SimpleNamespace)
    patch_once(AsyncOmniEngine, name, host_fixes.waiting_for_outputs)

    def waits_(pipeline: str | None):
        engine: Any = AsyncOmniEngine.__new__(AsyncOmniEngine)
        of = None if pipeline is None else SimpleNamespace(model_type=pipeline)
        engine.pipeline_config = of
        default = default_for(pipeline)
        engine._event_driven_orch_default = default
        made: Any = engine._create_orchestrator(event_driven_orch_default=default)
        # The orchestrator is told, and the engine is asked, later, by who reads it.
        assert made.event_driven_orch_default is engine._event_driven_orch_default
        return _event_driven_orch_enabled(default=made.event_driven_orch_default)

    return waits_


@every_case
def test_families_whose_tests_run_so_wait(waits, case):
    """All whose whole server is tested: of Qwen3-TTS the host sees to it by itself."""
    assert waits(case.family.waits_for_outputs_of or case.name)


def test_others_are_as_the_host_has_them(waits, monkeypatch):
    assert not waits("bark") and not waits(None)
    monkeypatch.setenv("VLLM_OMNI_EVENT_DRIVEN_ORCH", "0")
    assert not waits("fish_qwen3_omni"), "the host's variable has the last word"
