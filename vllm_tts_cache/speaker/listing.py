"""The list of model families: an entry-point group, ours and third parties' alike."""

import logging
from functools import cache
from importlib import metadata
from pathlib import Path

from vllm_tts_cache.errors import CheckpointError, ConfigError
from vllm_tts_cache.speaker.family import Family

logger = logging.getLogger("vllm.vllm_tts_cache")

GROUP = "vllm_tts_cache.families"


@cache
def families() -> tuple[Family, ...]:
    """Return all families that are installed, the default one first.

    One that cannot be imported is left out with a warning: it costs its own models
    the plugin, and no other.
    """
    found: dict[str, Family] = {}
    for entry in metadata.entry_points(group=GROUP):
        try:
            family = entry.load()
        except Exception as exc:  # noqa: BLE001  a third party's code
            logger.warning("Model family %s is left out: %s", entry.name, exc)
            continue
        if found.setdefault(family.name, family) is not family:
            logger.warning("A second model family %s is left out", family.name)
    return tuple(sorted(found.values(), key=lambda f: (not f.is_default, f.name)))


def family_of_checkpoint(model_dir: Path) -> Family:
    """Return the family of a checkpoint.

    Raises: CheckpointError if it is of none.
    """
    for family in families():
        if family.recognises(model_dir):
            return family
    known = ", ".join(family.title for family in families())
    raise CheckpointError(str(model_dir), f"is of no family that we know: {known}")


@cache
def family_of_model(*architectures: str) -> Family | None:
    """Return the family that puts a class in the place of one of these; None if none.

    Args:
        architectures: As vLLM's model configuration has them.
    """
    for family in families():
        if not family.models.keys().isdisjoint(architectures):
            return family
    return None


def trial_families() -> dict[str, Family]:
    """Return the families with a tiny checkpoint, by every name that commands take."""
    return {
        name: family
        for family in families()
        if family.tiny_part
        for name in family.command_names
    }


def default_family() -> Family:
    """Return the family of commands that name none.

    Raises: ConfigError if none is installed.
    """
    if not (trial := trial_families()):
        raise ConfigError("no model family is installed; run `make setup` again")
    return next(iter(trial.values()))
