"""``vllm-tts-cache verify``: read every stored voice and say what is wrong."""

import argparse

from vllm_tts_cache.config import load_settings

_DESCRIPTION = """\
Read the catalogue, the reference audio and the encodings under SPEAKER_SAMPLES_DIR, and
print one line for each thing that is wrong. Nothing is written, and servers may go on
using the directory. Status: 0 nothing is wrong, 1 something is, 2 there is nothing to
look at.
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
        help="first finish what killed processes began, as a server's start does",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what is wrong; 1 if something is.

    Raises:
        ConfigError: A setting is wrong, or no voices were ever stored there.
        StorageError: The storage cannot be read.
    """
    from vllm_tts_cache.store.opening import open_existing

    store = open_existing(load_settings())
    try:
        if arguments.repair:
            for line in store.recover():
                print(f"repaired: {line}")
        problems = store.verify()
    finally:
        store.close()
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{store.directory}: nothing wrong")
    return 1 if problems else 0
