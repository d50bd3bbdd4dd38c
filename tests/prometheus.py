"""A Prometheus of its own for one server on this machine."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from vllm_tts_cache.testing.server import HOST, free_port

SCRAPE_SECONDS = 2
_STOP_SECONDS = 30


class Prometheus:
    """Debian's, scraping one server at ``host:port``; a context manager."""

    def __init__(self, folder: Path, target: str, rules: Sequence[Path] = ()):
        self.url = f"http://{HOST}:{free_port()}"
        self._target, self._rules, self._folder = target, rules, folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Prometheus":
        if (program := shutil.which("prometheus")) is None:
            raise RuntimeError("Prometheus is not there: run `make prometheus`.")
        config = self._folder / "prometheus.yml"
        config.write_text(json.dumps(self._config()))  # JSON is YAML
        command = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(_STOP_SECONDS)

    def ask(self, query: str) -> list[dict[str, Any]] | None:
        """What a query answers now; None while Prometheus is not there yet."""
        try:
            answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query})
        except httpx.TransportError:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError("Prometheus ended: see prometheus.log") from None
            return None
        body = answer.json()
        if body["status"] != "success":
            raise RuntimeError(f"{query}: {body}")
        found = body["data"]["result"]
        return [each for each in found if each["value"][1] != "NaN"]

    def alerts(self) -> dict[str, tuple[str, str]]:
        """The rules that it evaluates, by name -> how that went, and their state."""
        groups = httpx.get(f"{self.url}/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: (rule["health"], rule["state"]) for rule in rules}

    def _config(self) -> dict[str, Any]:
        job = {"job_name": "tts", "static_configs": [{"targets": [self._target]}]}
        every = f"{SCRAPE_SECONDS}s"
        return {
            "global": {"scrape_interval": every, "evaluation_interval": every},
            "scrape_configs": [job],
            "rule_files": [str(path) for path in self._rules],
        }
