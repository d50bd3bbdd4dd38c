"""``--family`` of the trial commands."""

import argparse

from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.listing import default_family, trial_families


def add_family_option(parser: argparse.ArgumentParser) -> None:
    """Let a command be asked for any family that has a tiny checkpoint."""
    parser.add_argument(
        "--family",
        choices=sorted(trial_families()),
        default=default_family().short_name,
        help="(%(default)s)",
    )


def chosen_family(arguments: argparse.Namespace) -> Family:
    """Return the one that was asked for."""
    return trial_families()[arguments.family]
