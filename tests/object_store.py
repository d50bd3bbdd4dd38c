"""An S3 server of the tests' own: rclone's, from its package on PyPI.

One program without more to install, which keeps objects as files of a directory: so it
can be stopped and started again, and a test can look into it, or damage what is there.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from vllm_tts_cache.testing.server import free_port

BUCKET = "voices"
KEY, SECRET = "tests", "tests-secret"
START_SECONDS = 30


class ObjectServer:
    """One server; `start` and `stop` may be called again and again."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.process: subprocess.Popen[Any] | None = None
        self._port = free_port()
        (directory / BUCKET).mkdir()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """As an operator sets it, for obstore."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT": self.endpoint,
        }

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def files(self, prefix: str) -> list[Path]:
        """The objects below a prefix, as the server keeps them."""
        found = (self.directory / BUCKET / prefix).rglob("*")
        return sorted(path for path in found if path.is_file())

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = Path(sys.executable).with_name("rclone")
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(program if program.exists() else shutil.which("rclone")),
                    *("serve", "s3", "--config", os.devnull),
                    *("--addr", f"127.0.0.1:{self._port}"),
                    *("--auth-key", f"{KEY},{SECRET}"),
                    str(self.directory),
                ],
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                httpx.get(self.endpoint, timeout=1)
            except httpx.TransportError:
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < until, self.log()
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_SECONDS)
            self.process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It does nothing; its sockets stay open."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        return (self.directory / "log").read_text()


@contextmanager
def serving(directory: Path) -> Iterator[ObjectServer]:
    server = ObjectServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()
