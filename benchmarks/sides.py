"""The two servers that are compared: equal in all but one setting.

What a model's `StockSide` says comes on top, where stock could not run here as it is.
"""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import machine, server_plugins
from benchmarks.measure import OURS, STOCK
from benchmarks.models import Model
from vllm_tts_cache.testing.server import Server, ServerOptions, Speech, SpeechClient

CHUNK_FRAMES = 5
STOCK_ENVIRON = {"SPEAKER_CACHE_ENABLED": "0"}
_ROOT = Path(__file__).parents[1]
_DEVICE = "TTS_CACHE_CPU_DEVICE"
_SIGHT_TIMEOUT_SECONDS = 30.0
# Of many clients at once the last one waits for all others.
_ANSWER_TIMEOUT_SECONDS = 1_800.0
_CONNECTOR = "connector_of_shared_memory"  # of every deploy file of ours


class ProbedServer(Server):
    """A server whose API process can be looked into."""

    def command(self) -> list[str]:
        plain = super().command()
        entry = plain.index("vllm.entrypoints.cli.main")
        return [*plain[:entry], "benchmarks.probe_server", *plain[entry + 1 :]]


class Side:
    """One server, and what is asked of it.

    Args:
        name: ``stock``, or anything else for one of ours.
        model: What it serves.
        work: Its directory is made in here, empty.
        environ: What it is set beside the settings of every side.
        samples_dir: ``SPEAKER_SAMPLES_DIR``; None for an empty one.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        work: Path,
        environ: Mapping[str, str],
        *,
        samples_dir: Path | None = None,
    ):
        self.name, self.model = name, model
        checkpoint = model.checkpoint(work)
        directory = work / f"{model.name}-{name}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._sights = directory / "sights.jsonl"
        self._decodes = directory / "decodes.jsonl"
        plugins = model.server_plugins
        if self.is_stock:
            plugins += model.stock.server_plugins
        server_plugins.announce(directory / "plugin", plugins)
        inside = {
            "PYTHONPATH": f"{_ROOT}:{directory / 'plugin'}",
            "BENCHMARK_PROBE_FILE": str(self._sights),
            server_plugins.DECODES_FILE: str(self._decodes),
            server_plugins.CHECKPOINT: str(checkpoint),
            # Stages of one device start one by one, those of the other side as well.
            _DEVICE: f"{int(os.environ.get(_DEVICE, '0')) + self.is_stock}",
        }
        options = ServerOptions(
            model=checkpoint,
            samples_dir=samples_dir or directory / "speakers",
            log_path=directory / "server.log",
            environ={**model.environ, **environ, **inside},
            arguments=(
                "--omni",
                "--deploy-config",
                str(self._deploy_config(directory)),
            ),
        )
        self._server = ProbedServer(options)
        self.client = self._new_client()

    @property
    def is_stock(self) -> bool:
        return self.name == STOCK

    @property
    def is_ours(self) -> bool:
        return not self.is_stock

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self.client.close()
        self._server.stop()

    def restart(self, **environ: str) -> None:
        """The same storage, new processes, and ``environ`` beside what was set."""
        self.stop()
        old, port = self._server.options, self._server.port
        more = {**old.environ, **environ}
        changed = dataclasses.replace(old, environ=more, port=port)
        self._server = ProbedServer(changed)
        self.client = self._new_client()
        self._server.start()

    def signal(self, number: int) -> None:
        """Send the API process a signal."""
        os.kill(self.pid, number)

    def wait_until_ended(self, timeout_seconds: float) -> None:
        """Wait until the API process has ended. Raises: TimeoutError."""
        try:
            psutil.Process(self.pid).wait(timeout_seconds)
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired as exc:
            raise TimeoutError(f"{self.name} has not ended") from exc

    @property
    def pid(self) -> int:
        """Of the API process; its stages are its children."""
        return self._server.pid

    def api_rss_bytes(self) -> int:
        """Resident memory of the API process; its stages are processes of their own."""
        return machine.rss_bytes(self.pid)

    def register(self, name: str, sample: bytes, **fields: str) -> None:
        self.client.register(name, sample, **fields).raise_for_status()

    def precompute(self, name: str) -> None:
        """Ours encodes now; stock has no way to, and encodes in a request."""
        if self.is_ours:
            self.client.precompute(name).raise_for_status()

    def encodes(self) -> dict[str, int]:
        """What each encoder of ours has encoded so far; stock does not count."""
        return self.client.encodes() if self.is_ours else {}

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
        return self._seen_while(self._sights, lambda: self.speak(text, **fields))[0]

    def first_decode_ms(self, text: str, **fields: Any) -> float:
        """Speak, and return how long the codec decoder's first step took."""
        seen = self._seen_while(self._decodes, lambda: self.speak(text, **fields))
        return seen[0]["ms"]

    def decoding(self, text: str, **fields: Any) -> tuple[float, int]:
        """Speak; milliseconds of all the codec decoder's steps, bytes of audio."""
        spoken: list[Speech] = []

        def speak() -> None:
            spoken.append(self.speak(text, **fields))

        # A step is written down before its audio leaves the process.
        seen = self._seen_while(self._decodes, speak)
        return sum(step["ms"] for step in seen), len(spoken[0].audio)

    def _new_client(self) -> SpeechClient:
        return SpeechClient(self._server.url, timeout_seconds=_ANSWER_TIMEOUT_SECONDS)

    def _deploy_config(self, directory: Path) -> Path:
        """The shipped one, with chunks short enough to see when a stream stalls."""
        shorter = {"extra": {"codec_chunk_frames": CHUNK_FRAMES}}
        overlay: dict[str, Any] = {
            "base_config": str(self.model.family.deploy_file),
            "connectors": {_CONNECTOR: shorter},
        }
        stocks = self.model.stock.stage_0 if self.is_stock else {}
        changed = {0: {**self.model.stage_0, **stocks}, 1: self.model.stage_1}
        overlay["stages"] = [{"stage_id": n, **c} for n, c in changed.items() if c]
        path = directory / "deploy.yaml"
        path.write_text(yaml.safe_dump(overlay))
        return path

    def _seen_while(
        self, path: Path, act: Callable[[], object]
    ) -> list[dict[str, float]]:
        path.write_text("")  # a probe looks while its file exists
        try:
            act()
            until = time.monotonic() + _SIGHT_TIMEOUT_SECONDS
            while not (lines := path.read_text()).endswith("\n"):
                if time.monotonic() > until:
                    raise RuntimeError(f"{self.name}: the probe saw nothing")
                time.sleep(0.002)
        finally:
            path.unlink()
        return [json.loads(line) for line in lines.splitlines()]


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
        at_once(self, act)


def at_once(sides: Iterable[Side], act: Callable[[Side], None]) -> None:
    """Do it on all of them at once; all have been tried when this raises."""
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(act, side) for side in sides]:
            done.result()


def open_sides(model: Model, work: Path) -> Sides:
    stock = Side(STOCK, model, work, STOCK_ENVIRON)
    return Sides(stock, Side(OURS, model, work, {}))
