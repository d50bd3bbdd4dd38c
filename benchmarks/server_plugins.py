"""Plugins of the servers that we start, and of no other.

vLLM-Omni loads its general plugins in every process of a server. Their metadata is
written into the server's work directory, which only its PYTHONPATH names. The plugins
are in `models`, beside the models that need them; each acts where its host encodes: in
the processes of the stages, in the API process, or in both, and in no other.
"""

import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path

DECODES_FILE = "BENCHMARK_DECODER_FILE"
CHECKPOINT = "BENCHMARK_CHECKPOINT"
_NAME = "benchmark_server_plugins"
_METADATA = f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n"


def announce(directory: Path, entries: Sequence[str]) -> None:
    """Make ``directory``, as part of PYTHONPATH, announce each entry.

    An entry is ``module:function``, or a module whose ``register`` is meant.
    """
    info = directory / f"{_NAME}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    lines = [
        f"plugin_{number} = {entry if ':' in entry else f'{entry}:register'}"
        for number, entry in enumerate(entries)
    ]
    group = "\n".join(["[vllm_omni.general_plugins]", *lines, ""])
    (info / "entry_points.txt").write_text(group)


def is_api_process() -> bool:
    """Whether this process has no stage."""
    return multiprocessing.parent_process() is None


def is_server_api() -> bool:
    """Whether this is a server's API process, which has the host loaded already."""
    return is_api_process() and "vllm_omni.entrypoints.openai.api_server" in sys.modules


def is_server_process() -> bool:
    """Whether this is a server's API process, or that of one of its stages."""
    return is_server_api() or not is_api_process()
