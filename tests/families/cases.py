"""What tests need to know of a family beside what it says of itself.

Each family has a ``case.py`` in its folder here; whatever is in the list is tested.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vllm_tts_cache.speaker.family import Family, families
from vllm_tts_cache.speaker.modes import Mode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One family's.

    Attributes:
        stage: Engine arguments by which the host knows its stage 0.
        hf_config: Reads the host's configuration of a checkpoint.
        official_test: The test that compares with what is official, in the family's
            folder.
        announced: Encoder -> frames that a prompt makes room for before the audio is
            encoded, from its samples and its rate in Hz.
        mode_of: The mode of a prompt, from its additional information.
        message_max_bytes: Of a warm request to the engine.
        message_bytes_per_second: What it may grow by with the reference.
        short_of_kv: Values of stage 0 that leave no room in the KV for a crowd, and
            prefill in chunks: what its servers are started with.
        second_server: What its journey's second server is started with besides, see
            ``tests/e2e/test_journey.py``.
        does: What it is able to do beyond the rest: the shared tests that are marked
            so run on it. ``raw_embeddings`` speak; ``waits_for_kv``: with
            ``short_of_kv``; ``shares_kv``: of a voice's texts; ``two_api_processes``:
            so its second server is started; ``keeps_decoder_states``: of voices, and
            its second server keeps none. Words of its own mark tests in its own
            folder.
        refusing: Checkpoints of it that clone nothing, by what they are: written to a
            directory that is absent, with the fixture ``tiny`` at hand.
    """

    family: Family
    stage: Mapping[str, str]
    hf_config: Callable[[Path], Any]
    mode_of: Callable[[Mapping[str, Any]], Mode]
    official_test: str = "test_official.py"
    announced: Mapping[str, Callable[[int, int], int]] = field(default_factory=dict)
    message_max_bytes: int = 4096
    message_bytes_per_second: float = 0.0
    short_of_kv: Mapping[str, Any] = field(default_factory=dict)
    second_server: Mapping[str, Any] = field(default_factory=dict)
    does: frozenset[str] = frozenset()
    refusing: Mapping[str, Callable[[Path, Callable[..., Path]], None]] = field(
        default_factory=dict
    )

    @property
    def name(self) -> str:
        """The family's."""
        return self.family.name


@cache
def cases() -> tuple[Case, ...]:
    """Those of all families that have a tiny checkpoint, the default one first."""
    return tuple(case_of(family) for family in families() if family.tiny_part)


def case_of(family: Family) -> Case:
    """The one of a family."""
    case: Case = import_module(f"tests.families.{family.name}.case").CASE
    return case


def every_case(test: Any) -> Any:
    """Run a test on each family that has a tiny checkpoint, as ``case``."""
    return pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)(test)


def default_case() -> Case:
    """The one of the default family, for tests that are about no family."""
    return cases()[0]
