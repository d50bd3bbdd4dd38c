"""The figures of the field, by the host's own harness: see `benchmarks.harness`."""

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
    """Each number of clients, at least one request of each client in a turn."""
    bench.step(f"{NAME}: the voice, on both sides")
    targets = {side.name: target_of(side, bench) for side in bench.sides}
    for target in targets.values():
        target.register()
    clients = bench.pick(full=NUM_CLIENTS, quick=QUICK_CLIENTS)
    given = Clips(Path(mkdtemp(prefix=NAME, dir=bench.work)))
    made: list[Row] = []
    for each in clients:
        bench.step(f"{NAME}: {each} clients")
        made += rows(
            targets,
            clips=given,
            num_clients=each,
            num_requests=max(MIN_REQUESTS, each),
            num_rounds=bench.num_rounds,
            ways=(INLINE, IN_CONTEXT),
        )
    return made


def target_of(side: Side, bench: Bench) -> Target:
    """Return a side as the harness asks it."""
    checkpoint = bench.model.checkpoint(bench.work)
    url = str(side.client.http.base_url).rstrip("/")
    return Target(url=url, tokenizer=str(checkpoint), model=MODEL_NAME)
