"""What a family's encoders are made of, for the tests of their fingerprints.

Each family has an ``identities.py`` in its folder here, with `IDENTITIES`: encoder ->
what decides its encodings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from vllm_tts_cache.speaker.family import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Values of a JSON file of the checkpoint.

    Attributes:
        file: Below the checkpoint.
        path: Keys that lead to the section.
        values: All that could be in it, with what is meant where it is left out.
    """

    file: str
    path: tuple[str, ...] = ()
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One encoder's.

    Attributes:
        network: What its fingerprint calls it.
        config: What its part of the checkpoint's config may say.
        constants: Module -> names there of numbers and rules that an encoding depends
            on and no checkpoint can change.
        read: Values of the config that it must be known to read.
    """

    network: str
    config: tuple[Section, ...]
    constants: Mapping[ModuleType, tuple[str, ...]] = field(default_factory=dict)
    read: frozenset[str] = frozenset()


def identities_of(family: Family) -> Mapping[str, Identity]:
    """Those of a family's encoders."""
    name = f"tests.families.{family.name}.identities"
    found: Mapping[str, Identity] = import_module(name).IDENTITIES
    return found
