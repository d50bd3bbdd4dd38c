"""A process of ``registry_scale``: ``python -m benchmarks.start_process SIDE DIR``.

Does what an API process does with its voices while it starts, and nothing else of a
start; prints how long that took and, if asked to, what follows it.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine

PAGE = 100
NUM_PAGES = 50


class Ours:
    """Opens the service and gives the host its views, as our serving class does."""

    def __init__(self, directory: Path):
        from vllm_tts_cache.config import Settings

        self._settings = Settings(samples_dir=directory, max_uploaded=0)
        # Imported before anything is timed: that a start needs without voices too.
        from vllm_tts_cache.entrypoints import host_view, resolve, wiring

        self._host_view, self._resolve, self._wiring = host_view, resolve, wiring

    def start(self) -> Any:
        service = self._wiring.open_service(self._settings, None, lambda: None)
        view = self._host_view.HostView(service.storage)
        set(self._host_view.SpeakerNames(frozenset(), {}))
        return service, view, self._resolve.InlineClips(service.storage)

    def follow(self, started: Any) -> dict[str, float]:
        """Wait for the recovery, and list pages."""
        began = time.perf_counter()
        for thread in threading.enumerate():
            if thread.name == "tts-cache-recover":
                thread.join()
        recovered = time.perf_counter() - began
        registry, after, pages = started[0].storage.registry, "", []
        for _ in range(NUM_PAGES):
            began = time.perf_counter()
            page = registry.list(limit=PAGE, after=after)
            pages.append(1e3 * (time.perf_counter() - began))
            after = page[-1].name if page else ""
        return {"recover_seconds": recovered, "page_ms": sorted(pages)[NUM_PAGES // 2]}


class Stock:
    """The host's serving class, its speaker storage only: it opens every file."""

    def __init__(self, directory: Path):
        os.environ["SPEAKER_SAMPLES_DIR"] = str(directory)
        from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

        self._serving_class = OmniOpenAIServingSpeech

    def start(self) -> Any:
        serving = object.__new__(self._serving_class)
        serving._adapter = None  # type: ignore[assignment]
        serving._init_speaker_storage()
        return serving

    def follow(self, _started: Any) -> dict[str, float]:
        return {}


SIDES: dict[str, Callable[[Path], Ours | Stock]] = {"ours": Ours, "stock": Stock}


def measure(side: Ours | Stock, num_starts: int, *, follow: bool) -> dict[str, Any]:
    """Milliseconds of each start; memory that they and what follows added."""
    rss_before, took = machine.rss_bytes(), []
    found: dict[str, Any] = {"start_ms": took}
    for _ in range(num_starts):
        began = time.perf_counter()
        started = side.start()
        took.append(1e3 * (time.perf_counter() - began))
        if follow:
            found.update(side.follow(started))
    return {**found, "rss_bytes": machine.rss_bytes() - rss_before}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--follow", action="store_true")
    given = parser.parse_args()
    side = SIDES[given.side](given.directory)
    print(json.dumps(measure(side, given.starts, follow=given.follow)), flush=True)
    os._exit(0)  # the recovery may take longer than anybody waits for it


if __name__ == "__main__":
    main()
