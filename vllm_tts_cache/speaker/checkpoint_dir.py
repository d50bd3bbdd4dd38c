"""Finds and completes the folder of the checkpoint that the host serves; no torch."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import RemoteEntryNotFoundError

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.logs import logger
from vllm_tts_cache.speaker.family import SideFile


def whole_checkpoint(vllm_config: Any, side_files: Sequence[SideFile]) -> Path:
    """Return the folder of the checkpoint that a worker has loaded, with these files.

    For a revision other than main the host fetches weights and configs only, and takes
    other files from main; so this fetches them.

    Raises: CheckpointError that says what to download.
    """
    model = vllm_config.model_config
    return checkpoint_dir(
        model.model,
        model.revision,
        side_files=side_files,
        download_dir=vllm_config.load_config.download_dir,
        token=model.hf_token,
    )


def checkpoint_dir(
    model: str,
    revision: str | None = None,
    *,
    side_files: Sequence[SideFile] = (),
    download_dir: str | None = None,
    token: bool | str | None = None,
) -> Path:
    """Return the folder of a checkpoint.

    Args:
        model: A directory, or a Hugging Face id whose files were downloaded.
        revision: Revision of the id.
        side_files: Files that must exist too, each under one of its names; those of an
            id are fetched if they are missing, unless Hugging Face is off line.
        download_dir: Where the host stores weights, if apart from other files.
        token: For Hugging Face, as `huggingface_hub` takes it.

    Raises: CheckpointError that says what to download.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        _check_snapshot(directory, side_files)
        return directory
    # The first has the weights; the second has all of main.
    found = {
        cache_dir: folder
        for cache_dir in (download_dir, None)
        if (folder := _snapshot(model, revision, cache_dir)) is not None
    }
    if not found:
        command = _download_command(model, revision, (), download_dir)
        raise CheckpointError(
            model,
            "neither a directory nor a downloaded Hugging Face model; to download it: "
            f"{command}",
        )
    for folder in found.values():
        if not _missing(folder, side_files):
            return folder
    cache_dir, folder = next(iter(found.items()))
    _fetch(model, folder, _missing(folder, side_files), cache_dir, token)
    return folder


def _snapshot(model: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """Return the folder of a downloaded revision, which may lack files."""
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=True,
            ignore_patterns="*",  # else it refuses a folder that lacks files
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def _missing(folder: Path, files: Sequence[SideFile]) -> list[tuple[str, ...]]:
    """Return the names of each file that is missing under all of them."""
    named = [(file,) if isinstance(file, str) else file for file in files]
    return [names for names in named if not any((folder / n).is_file() for n in names)]


def _fetch(
    model: str,
    folder: Path,
    files: Sequence[tuple[str, ...]],
    cache_dir: str | None,
    token: bool | str | None,
) -> None:
    """Download files into a snapshot's folder; several processes may do so at once.

    Raises: CheckpointError.
    """
    commit = folder.name  # a branch may have moved on since
    logger.info("Fetching %s of %s, revision %s.", _listed(files), model, commit)
    fetch = partial(
        hf_hub_download, model, revision=commit, cache_dir=cache_dir, token=token
    )
    try:
        for *others, last in files:
            for name in others:
                with suppress(RemoteEntryNotFoundError):  # it has another name there
                    fetch(name)
                    break
            else:
                fetch(last)
    except Exception as exc:  # of the client or of its transport
        first_line = str(exc).partition("\n")[0]
        command = _download_command(model, commit, files, cache_dir)
        raise CheckpointError(
            model,
            f"its revision {commit} lacks {_listed(files)}, and fetching failed "
            f"({first_line or repr(exc)}); to download what is missing: {command}",
        ) from exc


def _listed(files: Sequence[tuple[str, ...]]) -> str:
    return ", ".join(" or ".join(names) for names in files)


def _check_snapshot(directory: Path, side_files: Sequence[SideFile]) -> None:
    """Refuse a folder of Hugging Face's cache that lacks files.

    With HF_HUB_OFFLINE the host replaces the id by such a folder. For another directory
    reading the file raises the better error.

    Raises: CheckpointError.
    """
    missing = _missing(directory, side_files)
    repository = directory.parent.parent
    if not missing or directory.parent.name != "snapshots":
        return
    kind, *names = repository.name.split("--")
    if kind == "models":
        which = "/".join(names), directory.name
        command = _download_command(*which, missing, str(repository.parent))
        raise CheckpointError(
            str(directory),
            f"it lacks {_listed(missing)}; to download it where there is a network: "
            f"{command}",
        )


def _download_command(
    model: str,
    revision: str | None,
    files: Sequence[tuple[str, ...]],
    cache_dir: str | None,
) -> str:
    # The command accepts names that the repository does not have.
    names = [name for file in files for name in file]
    options = {"--revision": revision, "--cache-dir": cache_dir}
    given = [part for name, value in options.items() if value for part in (name, value)]
    return shlex.join(["hf", "download", model, *names, *given])


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises: CheckpointError: The file cannot be read, or holds anything else.
    """
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
    except ValueError as exc:
        raise CheckpointError(str(path), f"not JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise CheckpointError(str(path), "not a JSON object")
    return parsed


def check_rates(
    path: Path, described: str, *, found: tuple[int, ...], known: tuple[int, ...]
) -> None:
    """Refuse other rates than ``known``, by which prompts announce their length.

    ``described`` has a place for each, and ``path`` is the source, for the message.

    Raises: CheckpointError.
    """
    if found != known:
        reason = f"voices are cloned at {described.format(*known)} only, and it has "
        raise CheckpointError(str(path), reason + described.format(*found))


def config_says(model_dir: Path, field: str, value: object) -> bool:
    """Tell whether a checkpoint's ``config.json`` has this value in this field."""
    try:
        return read_json(model_dir / "config.json").get(field) == value
    except CheckpointError:
        return False
