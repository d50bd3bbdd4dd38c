"""Registered voices and cached reference encodings for vLLM-Omni text-to-speech."""

from collections.abc import Callable
from typing import Any, NamedTuple

__version__ = "0.1.0"

# The version of vLLM and vLLM-Omni that it is for.
SUPPORTED_HOST = "0.30"

_MARK = "_vllm_tts_cache_patch"


class Patch(NamedTuple):
    """Names what of the host, or of torch, we replace from outside.

    Attributes:
        owner: The class or module, by its dotted name.
        names: Attributes of it, apart by spaces.
        reason: Why.
        until: The vLLM-Omni version with which it goes, or what the host must do first.
    """

    owner: str
    names: str
    reason: str
    until: str


def patch_once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute that a list of `Patch` names; again, it changes nothing.

    Args:
        owner: The class or module that has it.
        name: The attribute's.
        make: Returns the replacement, given what is there, or None.
    """
    if not hasattr(vars(owner).get(name), _MARK):
        ours = make(getattr(owner, name, None))
        setattr(ours, _MARK, True)
        setattr(owner, name, ours)
