"""The two servers that are compared: equal in all but one setting."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import float32_encoders
from vllm_tts_cache.testing.client import Speech, SpeechClient
from vllm_tts_cache.testing.server import QWEN3_TTS_CPU, Server, ServerOptions

CHUNK_FRAMES = 5
_ROOT = Path(__file__).parents[1]
_SIGHT_TIMEOUT_SECONDS = 30.0


class ProbedServer(Server):
    """A server whose API process can be looked into."""

    def command(self) -> list[str]:
        plain = super().command()
        entry = plain.index("vllm.entrypoints.cli.main")
        return [*plain[:entry], "benchmarks.probe_server", *plain[entry + 1 :]]


class Side:
    """One server, and what is asked of it.

    Attributes:
        name: ``stock`` or ``ours``.
    """

    def __init__(self, name: str, model: Path, work: Path, environ: dict[str, str]):
        self.name = name
        directory = work / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._sights = directory / "sights.jsonl"
        float32_encoders.write_metadata(directory / "plugin")
        inside = {
            "PYTHONPATH": f"{_ROOT}:{directory / 'plugin'}",
            "BENCHMARK_PROBE_FILE": str(self._sights),
        }
        options = ServerOptions(
            model=model,
            samples_dir=directory / "speakers",
            log_path=directory / "server.log",
            environ={**environ, **inside},
            arguments=("--omni", "--deploy-config", str(_deploy_config(directory))),
        )
        self._server = ProbedServer(options)
        self.client = SpeechClient(self._server.url)

    @property
    def is_ours(self) -> bool:
        return self.name == "ours"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self.client.close()
        self._server.stop()

    def restart(self) -> None:
        """The same storage, the same port, new processes."""
        self._server.stop()
        self.client.close()
        self.client = SpeechClient(self._server.url)
        self._server.start()

    def register(self, name: str, sample: bytes, **fields: str) -> None:
        self.client.register(name, sample, **fields).raise_for_status()

    def precompute(self, name: str) -> None:
        """Ours encodes now; stock has no way to, and encodes in a request."""
        if self.is_ours:
            self.client.precompute(name).raise_for_status()

    def speak(self, text: str, **fields: Any) -> Speech:
        """Speak a stream to its end.

        Raises: RuntimeError if there is no audio.
        """
        speech = self.client.speak(text, **fields)
        if speech.status != 200 or not speech.audio:
            raise RuntimeError(f"{self.name}: {speech.status} {speech.audio[:500]!r}")
        return speech

    def look_inside(self, text: str, **fields: Any) -> dict[str, float]:
        """Speak, and return what the probe saw of it."""
        self._sights.write_text("")
        try:
            self.speak(text, **fields)
            until = time.monotonic() + _SIGHT_TIMEOUT_SECONDS
            while not (line := self._sights.read_text()).endswith("\n"):
                if time.monotonic() > until:
                    raise RuntimeError(f"{self.name}: the probe saw nothing")
                time.sleep(0.002)
        finally:
            self._sights.unlink()
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class Sides:
    """Both servers up; only one is driven at a time."""

    stock: Side
    ours: Side

    def __iter__(self) -> Iterator[Side]:
        return iter((self.stock, self.ours))

    def in_turns(self, num_rounds: int) -> Iterator[tuple[int, Side]]:
        """A B, B A, A B ...: a drift of the machine does not favour a side."""
        for number in range(num_rounds):
            order = list(self) if number % 2 == 0 else list(self)[::-1]
            yield from ((number, side) for side in order)

    def both(self, act: Callable[[Side], None]) -> None:
        """Do it on both at once; for what is not measured."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(act, self))


def open_sides(model: Path, work: Path) -> Sides:
    off = {"SPEAKER_CACHE_ENABLED": "0"}
    return Sides(Side("stock", model, work, off), Side("ours", model, work, {}))


def _deploy_config(directory: Path) -> Path:
    """The shipped one, with chunks short enough to see when a stream stalls."""
    text = QWEN3_TTS_CPU.read_text()
    changed = text.replace(
        "codec_chunk_frames: 25", f"codec_chunk_frames: {CHUNK_FRAMES}"
    )
    assert changed != text
    path = directory / "deploy.yaml"
    path.write_text(changed)
    return path
