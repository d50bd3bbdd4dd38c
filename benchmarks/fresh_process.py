"""Measurements that need a process of their own, such as of its memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def run(module: str, *arguments: object) -> dict[str, Any]:
    """Run ``python -m module``; its last line of output is JSON, which is returned.

    Raises: RuntimeError with the end of its error output if it fails.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, check=False, cwd=_ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{module}: {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
