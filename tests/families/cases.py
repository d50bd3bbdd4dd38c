"""What tests need to know of a family beside what it says of itself.

Each family has a ``case.py`` in its folder here; whatever is in the list is tested.
Those with a tiny checkpoint have an ``identities.py`` as well, with `IDENTITIES`:
encoder -> what decides its encodings.
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.speaker.family import Family, Mode, families

Arrays = Callable[[ReferenceAudio], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One family's.

    Attributes:
        stage: Engine arguments by which the host knows its stage 0.
        hf_config: Reads the host's configuration of a checkpoint.
        mode_of: The mode of a prompt, from its additional information.
        write: Writes what its talker or its API process is tested with to a directory
            that is absent, where it has no tiny checkpoint; with ``tiny`` at hand.
        loading: Engine arguments that its talker is loaded with besides.
        stand_in: A context of what stands for its talker, with a folder at hand, where
            the host's cannot be loaded.
        arrays: Encoder -> arrays as it gives them for a clip, all zeros.
        weights: Files of them that its encoders read.
        announces: Whether they are as long as they are, whatever the clip: a prompt
            makes room for them before the audio is encoded.
        serve: Called with a server in this process that has begun.
        control_tokens: What no text may hold.
        refused: Fields of requests that are refused, and what the answer says; "Ann"
            is registered, without a transcript.
        message_max_bytes: Of a warm request to the engine.
        message_bytes_per_second: What it may grow by with the reference.
        short_of_kv: Values of stage 0 that leave no room in the KV for a crowd, and
            prefill in chunks: what its servers are started with.
        second_server: What its journey's second server is started with besides, see
            ``tests/e2e/test_journey.py``.
        does: What it is able to do beyond the rest: the shared tests that are marked
            so run on it. Words of its own mark tests in its own folder.
        refusing: Checkpoints of it that clone nothing, by what they are: written to a
            directory that is absent, with the fixture ``tiny`` at hand.
    """

    family: Family
    stage: Mapping[str, str]
    hf_config: Callable[[Path], Any]
    mode_of: Callable[[Mapping[str, Any]], Mode]
    write: Callable[[Path, Callable[..., Path]], object] | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    stand_in: Callable[[Path], AbstractContextManager[Any]] | None = None
    arrays: Mapping[str, Arrays] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    announces: bool = True
    serve: Callable[[Any], None] = lambda _server: None
    control_tokens: tuple[str, ...] = ()
    refused: tuple[tuple[Mapping[str, Any], str], ...] = ()
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


def talker(name: str, architecture: str) -> Mapping[str, str]:
    """The stage of a talker."""
    return {"model_stage": name, "model_arch": architecture, "worker_type": "ar"}


def codes(num_frames: Callable[[int, int], int], num_codebooks: int) -> Arrays:
    """Codes of as many frames as that says of a number of samples and their rate."""

    def like(audio: ReferenceAudio) -> Mapping[str, Any]:
        number = num_frames(audio.num_samples, audio.sample_rate_hz)
        return {"codes": np.zeros((number, num_codebooks), np.int16)}

    return like


def read_by(path: str) -> Callable[[Path], Any]:
    """Read a checkpoint's configuration by a class of the host's: ``module:class``."""
    return lambda checkpoint: pkgutil.resolve_name(path).from_pretrained(checkpoint)


def made_by(path: str) -> Callable[[Path], Any]:
    """The same without a checkpoint's own: the host reads none of it."""
    return lambda _checkpoint: pkgutil.resolve_name(path)()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """All that could be in a JSON file of the checkpoint, or what leaving it out means.

    The keys in ``path`` lead to the section.
    """

    file: str
    path: tuple[str, ...] = ()
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One encoder's: what its fingerprint calls it, and what its config may say."""

    network: str
    config: tuple[Section, ...]
    # Module -> names there of numbers and rules that an encoding depends on and no
    # checkpoint can change.
    constants: Mapping[ModuleType, tuple[str, ...]] = field(default_factory=dict)
    read: frozenset[str] = frozenset()  # values that it must be known to read


def identities_of(family: Family) -> Mapping[str, Identity]:
    """Those of a family's encoders."""
    name = f"tests.families.{family.name}.identities"
    found: Mapping[str, Identity] = import_module(name).IDENTITIES
    return found


@cache
def cases() -> tuple[Case, ...]:
    """Those of all families that have a tiny checkpoint, the default one first."""
    return tuple(case_of(family) for family in families() if family.tiny_part)


def case_of(family: Family) -> Case:
    """The one of a family."""
    case: Case = import_module(f"tests.families.{family.name}.case").CASE
    return case


def of(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Run a test with each of these as its ``own_case``."""
    names = lambda case: case.name  # noqa: E731
    return pytest.mark.parametrize("own_case", [*cases], ids=names, scope="module")


def every_case(test: Any) -> Any:
    """Run a test on each family that has a tiny checkpoint, as ``case``."""
    return pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)(test)


def unlike_cases(test: Any) -> Any:
    """As `every_case`; in the long proofs only but for two that have little in common.

    One computes by torch what the host's own classes would, and the other by ONNX.
    """
    marked = [
        pytest.param(case, marks=() if is_tried(case.family) else pytest.mark.long)
        for case in cases()
    ]
    return pytest.mark.parametrize("case", marked, ids=lambda case: case.name)(test)


def is_tried(family: Family) -> bool:
    """Whether `unlike_cases` has it in each run."""
    return family.name in ("qwen3_tts", "cosyvoice3")


def cloning_cases() -> tuple[Case, ...]:
    """Those of all families that clone, the default one first."""
    return tuple(case_of(family) for family in families() if family.modes)


def default_case() -> Case:
    """The one of the default family, for tests that are about no family."""
    return cases()[0]
