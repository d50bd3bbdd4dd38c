"""Registered voices and cached reference encodings for vLLM-Omni text-to-speech."""

from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

__version__ = "0.1.0"

# The versions of vLLM-Omni that this package is for. The last stable one comes first.
SUPPORTED_HOSTS = ("0.30", "0.32")


def is_supported_host(version: str) -> bool:
    """Tell whether this package is for a version of vLLM-Omni, or of vLLM."""
    return any(f"{version}.".startswith(f"{host}.") for host in SUPPORTED_HOSTS)


def installed_version(distribution: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_MARK = "_vllm_tts_cache_patch"


class Patch(NamedTuple):
    """Attributes of the host, or of torch, that this package replaces.

    Attributes:
        owner: The class or module that has them, by its dotted name.
        names: Their names, separated by spaces.
        reason: Why they are replaced.
        until: The vLLM-Omni version, or the change in the host, that ends the need.
    """

    owner: str
    names: str
    reason: str
    until: str


def patch_once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of the host or of one layer; a second call does nothing.

    ``make`` returns the replacement, given the attribute's value or None.
    """
    if not hasattr(vars(owner).get(name), _MARK):
        ours = make(getattr(owner, name, None))
        setattr(ours, _MARK, True)
        setattr(owner, name, ours)
