"""Plugins of the servers that we start, and of no other.

vLLM-Omni loads its general plugins in every process of a server. Their metadata is
written into the server's work directory, which only its PYTHONPATH names.
"""

from collections.abc import Sequence
from pathlib import Path

_NAME = "benchmark_server_plugins"
_METADATA = f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n"


def announce(directory: Path, modules: Sequence[str]) -> None:
    """Make ``directory``, as part of PYTHONPATH, announce each ``module:register``."""
    info = directory / f"{_NAME}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    lines = [f"{module.replace('.', '_')} = {module}:register" for module in modules]
    group = "\n".join(["[vllm_omni.general_plugins]", *lines, ""])
    (info / "entry_points.txt").write_text(group)
