"""``vllm-tts-cache stage-config``: where our deploy files are."""

import argparse

from vllm_tts_cache.stage_configs import FOLDER

_DESCRIPTION = """\
Print the path of a deploy file of ours, for `vllm serve --deploy-config`. What each one
changes against the host's, and why, is written in it.
"""
_EXAMPLES = """\
examples:
  # one KV prefix per voice: a second text of a voice prefills only that text
  vllm serve fishaudio/s2-pro --omni \\
    --deploy-config "$(vllm-tts-cache stage-config fish-speech)"
"""


def add_parser(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> None:
    """Register the command; ``run`` is what the arguments are handed to."""
    parser = subparsers.add_parser(
        "stage-config",
        help="print the path of a deploy file",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.yaml"))
    parser.add_argument("name", choices=names)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the path alone, so that a shell can take it."""
    print(FOLDER / f"{arguments.name.replace('-', '_')}.yaml")
    return 0
