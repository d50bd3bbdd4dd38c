"""What the trial commands share: the family, and directories that they may empty."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.speaker.family import Family, default_family, trial_families
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

_OURS = ".vllm-tts-cache-work"


def own(work: Path) -> Path:
    """Return ``work`` as an absolute path, made if missing.

    Raises:
        ConfigError: It holds something, and no command of ours made it.
        StorageError: It cannot be made.
    """
    work = work.expanduser().absolute()
    with storage_errors(work):
        if work.exists() and not work.is_dir():
            raise ConfigError(f"--work {work}: is not a directory")
        if work.is_dir() and any(work.iterdir()) and not (work / _OURS).exists():
            raise ConfigError(
                f"--work {work}: is not empty and was not made by this command, so "
                "it is left alone; choose another directory"
            )
        work.mkdir(parents=True, exist_ok=True)
        (work / _OURS).touch()
    return work


def emptied(directory: Path) -> Path:
    """Return a directory of an owned one, empty.

    Raises: StorageError.
    """
    with storage_errors(directory):
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir()
    return directory


def tiny_checkpoint(work: Path, family: Family, report: Callable[[str], None]) -> Path:
    """Return a checkpoint with random weights, written unless it is there already.

    Raises: ConfigError, StorageError.
    """
    return TinyCheckpoint.of(family).ensure(work / f"tiny-{family.name}", report)


def _known(name: str | None) -> str:
    if name is None:
        return default_family().short_name
    if name not in trial_families():
        known = ", ".join(sorted(trial_families()))
        raise typer.BadParameter(f"{name!r} is none of {known}")
    return name


def _family_names() -> list[str]:
    return sorted(trial_families())


# Let a command be asked for any family that has a tiny checkpoint.
FamilyName = Annotated[
    str | None,
    typer.Option(
        "--family",
        callback=_known,
        autocompletion=_family_names,
        help="`vllm-tts-cache families` lists them as commands  [default: qwen3]",
    ),
]


def chosen_family(name: str | None) -> Family:
    """Return the one that was asked for."""
    return trial_families()[_known(name)]
