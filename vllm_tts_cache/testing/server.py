"""A real server in processes of its own, and a small client of its routes."""

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from vllm_tts_cache.client import CACHE_HEADER
from vllm_tts_cache.errors import ServerFaultError

TIMEOUT_SECONDS = 300.0

HOST = "127.0.0.1"
# On a loaded machine a start takes ten times its usual minute. If a stage dies, the
# others wait, and the server's process does not end.
START_TIMEOUT_SECONDS = 600.0
STOP_TIMEOUT_SECONDS = 60.0  # a server may drain its requests for 20 s
MODEL_NAME = "tts"

# One thread a stage: two stages share two cores, and a thread that waits for the other
# stage's core costs more than it computes. Workers inside the stages' own processes
# halve the memory and the start.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # as users' starts, but for the first one
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """One answer of the speech route.

    Attributes:
        audio: The body: samples, or an error as JSON.
        cache: ``hit``, ``miss`` or ``none``; None with an error.
    """

    status: int
    audio: bytes
    cache: str | None
    ttfa_seconds: float


class SpeechClient:
    """Talks to one server."""

    def __init__(self, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS):
        # The test servers are on this machine, and no proxy leads to them.
        self.http = httpx.Client(base_url=url, timeout=timeout_seconds, trust_env=False)

    def register(
        self, name: str, sample: Path | bytes, **fields: str
    ) -> httpx.Response:
        """Register a voice by a clip; by default it is not precomputed."""
        data = sample.read_bytes() if isinstance(sample, Path) else sample
        form = {"name": name, "consent": "consent-1", "precompute": "false", **fields}
        files = {"audio_sample": ("clip", data)}
        return self.http.post("/v1/audio/voices", data=form, files=files)

    def precompute(self, name: str) -> httpx.Response:
        """Make the voice's encodings exist, and wait."""
        return self.http.post(f"/v1/audio/voices/{name}/cache")

    def speak(self, text: str = "Hello world.", **fields: Any) -> Speech:
        """Speak as a raw PCM stream, with a fixed seed unless ``fields`` have one."""
        body = {
            "model": MODEL_NAME,
            "input": text,
            "seed": 7,
            "response_format": "pcm",
            "stream": True,
            "stream_format": "audio",
            **fields,
        }
        began = time.perf_counter()
        ttfa_seconds, audio = None, bytearray()
        with self.http.stream("POST", "/v1/audio/speech", json=body) as response:
            for chunk in response.iter_raw():
                ttfa_seconds = ttfa_seconds or time.perf_counter() - began
                audio += chunk
        return Speech(
            status=response.status_code,
            audio=bytes(audio),
            cache=response.headers.get(CACHE_HEADER),
            ttfa_seconds=ttfa_seconds or time.perf_counter() - began,
        )

    def stats(self) -> dict[str, Any]:
        """Counters of the registry and of each worker."""
        return self.http.get("/v1/audio/speaker_cache").raise_for_status().json()

    def encodes(self) -> dict[str, int]:
        """Encodes since the workers' start, by encoder, over all workers."""
        total = Counter[str]()
        for worker in self.stats()["workers"]:
            total.update(worker["encodes"])
        return total

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


def data_url(sample: Path | bytes) -> str:
    """The clip as an inline ``ref_audio``."""
    data = sample.read_bytes() if isinstance(sample, Path) else sample
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What to serve, and how.

    Attributes:
        log_path: The server's output is appended.
        arguments: Of ``vllm serve``; see `tiny_checkpoint.serve_arguments`.
        port: None for a free one.
        environ: Variables that are added to (and replace) those of this process.
    """

    model: Path
    samples_dir: Path
    log_path: Path
    arguments: tuple[str, ...]
    port: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


class Server:
    """``vllm serve`` as a user starts it; a context manager that stops it."""

    def __init__(self, options: ServerOptions):
        self.options = options
        self.port = options.port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the API server, which leads a process group of its own."""
        assert self._process is not None
        return self._process.pid

    def start(
        self, report: Callable[[float], None] = lambda _seconds: None
    ) -> "Server":
        """Start, wait until the server is healthy, and report the seconds passed.

        Raises: ServerFaultError if it ends or takes too long; the text names its log.
        """
        self.options.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.options.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(report)
        except BaseException:  # an interrupt too: nothing else would stop the server
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """Ask the server to end, as Ctrl-C does; kill its process group if it stays."""
        try:
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_TIMEOUT_SECONDS)
        finally:  # also if the wait is interrupted
            self.kill()

    def kill(self) -> None:
        """SIGKILL every process of the group: a power cut, seen from the storage."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _wait_for_group(self._process.pid)
        self._process = None

    def is_healthy(self) -> bool:
        """Whether the server's health route answers 200."""
        try:
            # Reading the machine's certificates takes longer than the answer.
            health = httpx.get(
                f"{self.url}/health", timeout=5, trust_env=False, verify=False
            )
            return health.status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def command(self) -> list[str]:
        """Return the command line of the server."""
        entry = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        where = ["--host", HOST, "--port", str(self.port)]
        name = ["--served-model-name", MODEL_NAME]
        return [*entry, str(self.options.model), *name, *self.options.arguments, *where]

    def environment(self) -> dict[str, str]:
        """Return the whole environment that the server runs in."""
        samples = {"SPEAKER_SAMPLES_DIR": str(self.options.samples_dir)}
        given = {**samples, **self.options.environ}
        return {**os.environ, **_ENVIRONMENT, **given}  # noqa: TID251

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_healthy(self, report: Callable[[float], None]) -> None:
        assert self._process is not None
        began = time.monotonic()
        while not self.is_healthy():
            waited = time.monotonic() - began
            has_ended = self._process.poll() is not None
            if has_ended or waited > START_TIMEOUT_SECONDS:
                what = "ended" if has_ended else "was not healthy in time"
                log = self.options.log_path
                raise ServerFaultError(f"The server {what}; see {log}")
            report(waited)
            time.sleep(0.25)


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def _wait_for_group(group: int) -> None:
    """Wait until the stages have ended too: they hold locks and shared memory."""
    until = time.monotonic() + STOP_TIMEOUT_SECONDS
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
