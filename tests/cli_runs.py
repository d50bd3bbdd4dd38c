"""The command line, run against servers of this process."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.entrypoints.cli import main

MAIN = "from vllm_tts_cache.entrypoints.cli import main; raise SystemExit(main())"
OURS = ("VLLM_API_KEY", "SPEAKER_URL")


@dataclass(frozen=True)
class Run:
    """What a command left: its exit status and what it printed."""

    status: int | None
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


async def run(*arguments, url=None) -> Run:
    """Run a command in a thread, beside the server's event loop."""
    return await asyncio.to_thread(_called, *arguments, *_at(url))


async def begun(*arguments, url=None, **environ: str):
    """Start a command in a process of its own; it is not waited for."""
    env = {name: text for name, text in os.environ.items() if name not in OURS}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        MAIN,
        *map(str, (*arguments, *_at(url))),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**env, **environ},
        preexec_fn=_heed_interrupts,
    )


async def ended(process) -> Run:
    """Wait for it."""
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return Run(process.returncode, (out or b"").decode(), err.decode())


def printed_by(code: str, **environ: str) -> str:
    """What a new Python prints that runs the code, which must not fail."""
    command, env = [sys.executable, "-c", code], {**os.environ, **environ}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _heed_interrupts():
    # Whoever starts the tests in the background starts them deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _called(*arguments) -> Run:
    out, err = _captured(), _captured()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return Run(status, _text(out), _text(err))


def _captured():
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _text(file):
    file.flush()
    return file.buffer.getvalue().decode(errors="replace")


def _at(url):
    return () if url is None else ("--url", url)
