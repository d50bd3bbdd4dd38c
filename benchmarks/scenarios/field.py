"""The figures of the field, by the host's own harness: see `benchmarks.harness`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.bench import Bench
from benchmarks.harness import IN_CONTEXT, INLINE, NUM_CLIENTS, Clips, Target, rows
from benchmarks.measure import Row
from benchmarks.sides import Side
from vllm_tts_cache.testing.server import MODEL_NAME

NAME = "field"
MIN_REQUESTS, QUICK_CLIENTS = 8, (1, 4)


def run(bench: Bench) -> list[Row]:
    """A clip in each request and a registered voice, by stock and by ours."""
    clients = bench.pick(full=NUM_CLIENTS, quick=QUICK_CLIENTS)
    return ask(bench, NAME, bench.sides, clients, (INLINE, IN_CONTEXT))


def ask(
    bench: Bench,
    name: str,
    sides: Iterable[Side],
    clients: Sequence[int],
    ways: Sequence[str],
) -> list[Row]:
    """Each number of clients, at least one request of each client in a turn."""
    bench.step(f"{name}: the voice")
    targets = {side.name: _target(side, bench) for side in sides}
    for target in targets.values():
        target.register()
    given = Clips(Path(mkdtemp(prefix=name, dir=bench.work)))
    made: list[Row] = []
    for each in clients:
        bench.step(f"{name}: {each} clients")
        made += rows(
            targets,
            clips=given,
            num_clients=each,
            num_requests=max(MIN_REQUESTS, each),
            num_rounds=bench.num_rounds,
            ways=ways,
        )
    return made


def _target(side: Side, bench: Bench) -> Target:
    checkpoint = bench.model.checkpoint(bench.work)
    url = str(side.client.http.base_url).rstrip("/")
    return Target(url=url, tokenizer=str(checkpoint), model=MODEL_NAME)
