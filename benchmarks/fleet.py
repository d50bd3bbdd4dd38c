"""Two servers that share PostgreSQL and a bucket, beside one that has a directory.

    python -m benchmarks.fleet [--rounds 20] [--work DIRECTORY]

What a request costs on one machine and in the fleet, and the first of a voice on the
server that did not encode it. Needs what the tests need: `make postgres`.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks import machine
from benchmarks.bench import clip
from benchmarks.models import models
from benchmarks.sides import Side
from tests import object_store, postgres

MODEL = "qwen3-tts-tiny"
CLIP_SECONDS = 10
NUM_WARM = 3
SIGHTS = {
    "prepare_ms": "until the engine is called, ms",
    "cpu_ms": "CPU of the API process until then, ms",
    "stall_ms": "longest stall of the event loop, ms",
    "engine_bytes": "message to the engine, bytes",
}


def main() -> None:
    """Measure, and print what came of it."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--work", type=Path)
    given = arguments.parse_args()
    print(f"{machine.describe()}, {machine.revision()[0]}", flush=True)
    with ExitStack() as ended:
        work = given.work or Path(ended.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        shared = ended.enter_context(_shared(work))
        model = next(each for each in models() if each.name == MODEL)
        servers = [
            Side("alone", model, work, {}),
            *(Side(name, model, work, shared) for name in ("one", "other")),
        ]
        for side in servers:  # the host starts one stage at a time
            side.start()
            ended.callback(side.stop)
        for line in Figures(*servers).measured(given.rounds):
            print(line, flush=True)


@contextmanager
def _shared(work: Path) -> Iterator[Mapping[str, str]]:
    """PostgreSQL and a bucket, as settings."""
    objects = work / "objects"
    objects.mkdir()
    with postgres.running() as database, object_store.serving(objects) as bucket:
        yield {
            "SPEAKER_CATALOGUE_URL": database.make("fleet"),
            "SPEAKER_STORE_URL": bucket.url("voices"),
            **bucket.environment,
        }


class Figures:
    """What requests cost.

    Args:
        alone: Has a directory of its own.
        one: Where voices are registered and encoded; of the fleet.
        other: Which shares them.
    """

    def __init__(self, alone: Side, one: Side, other: Side):
        self._alone, self._one, self._other = alone, one, other
        self._numbers = count(1)
        self._seen: dict[str, list[dict[str, float]]] = {"alone": [], "fleet": []}
        self._ttfa_ms: dict[str, list[float]] = {"first": [], "loaded": [], "warm": []}

    def measured(self, num_rounds: int) -> Iterator[str]:
        """Lines of a table."""
        for side in (self._alone, self._one):
            self._register(side, "warm")
            for _ in range(NUM_WARM):
                side.speak(self._text(), voice="warm")
        for number in range(num_rounds):
            sides = [(self._alone, "alone"), (self._one, "fleet")]
            for side, what in sides[:: 1 if number % 2 else -1]:
                sight = side.look_inside(self._text(), voice="warm")
                self._seen[what].append(sight)
        for number in range(num_rounds):
            for is_loaded in (number % 2 == 0, number % 2 != 0):
                self._first(f"voice-{number}-{is_loaded}", is_loaded=is_loaded)
        for field, title in SIGHTS.items():
            alone, fleet = (
                median(sight[field] for sight in self._seen[what])
                for what in ("alone", "fleet")
            )
            yield f"{title}: alone {alone:.2f}, fleet {fleet:.2f}"
        first, loaded, warm = map(median, self._ttfa_ms.values())
        yield (
            "first audio on the server that did not encode, ms: "
            f"of a voice that it has to load {first:.0f} ({first / warm:.2f}x), "
            f"of one that it has loaded {loaded:.0f} ({loaded / warm:.2f}x), "
            f"warm {warm:.0f}"
        )

    def _num_warmed(self) -> int:
        return self._other.client.stats()["kv_warming"]["warmed"]

    def _first(self, name: str, *, is_loaded: bool) -> None:
        self._register(self._one, name)
        if is_loaded:
            num_warmed = self._num_warmed()
            self._other.precompute(name)
            while self._num_warmed() == num_warmed:
                time.sleep(0.1)
        times = [
            1e3 * self._other.speak(self._text(), voice=name).ttfa_seconds
            for _ in range(1 + NUM_WARM)
        ]
        self._ttfa_ms["loaded" if is_loaded else "first"].append(times[0])
        self._ttfa_ms["warm"].append(median(times[1:]))

    def _register(self, side: Side, name: str) -> None:
        side.register(name, clip(CLIP_SECONDS, next(self._numbers)), **self._fields)
        side.precompute(name)

    @property
    def _fields(self) -> Mapping[str, str]:
        *_, fullest = self._one.model.modes.values()
        return fullest

    def _text(self) -> str:
        return f"Number {next(self._numbers):05d}."


if __name__ == "__main__":
    main()
