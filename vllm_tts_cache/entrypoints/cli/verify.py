"""``vllm-tts-cache verify``: read every stored voice and say what is wrong."""

import argparse
from typing import TYPE_CHECKING

from vllm_tts_cache.config import Settings, load_settings
from vllm_tts_cache.errors import ConfigError

if TYPE_CHECKING:
    from vllm_tts_cache.entrypoints.storage import Storage

_DESCRIPTION = """\
Read the registry, the reference audio and the encodings under SPEAKER_SAMPLES_DIR, and
print one line for each thing that is wrong. Servers may go on using the directory.
Status: 0 nothing is wrong, 1 something is, 2 there is nothing to look at.
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the command; ``run`` is what the arguments are handed to."""
    parser = subparsers.add_parser(
        "verify",
        help="check the stored voices under SPEAKER_SAMPLES_DIR",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="first remove what killed processes left behind, as a server's start does",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is wrong; 1 if something is.

    Raises:
        ConfigError: A setting is wrong, or no voices were ever stored there.
        StorageError: The storage cannot be read.
    """
    storage = _open(load_settings())
    try:
        if arguments.repair:
            _repair(storage)
        problems = storage.verify()
    finally:
        storage.registry.close()
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{storage.directory}: nothing wrong")
    return 1 if problems else 0


def _open(settings: Settings) -> "Storage":
    from vllm_tts_cache.entrypoints.storage import open_storage

    # Opening creates what is missing, which would make a mistyped path look right.
    if not (settings.samples_dir / "registry.sqlite3").is_file():
        raise ConfigError(
            f"SPEAKER_SAMPLES_DIR={str(settings.samples_dir)!r}: no server has stored "
            "voices there. Set SPEAKER_SAMPLES_DIR to the directory that the server "
            "uses, or start the server once."
        )
    return open_storage(settings)


def _repair(storage: "Storage") -> None:
    for audio_sha256 in storage.recover():
        print(f"removed audio {audio_sha256}: no speaker has it")
