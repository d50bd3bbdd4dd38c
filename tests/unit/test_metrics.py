import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.in_process_workers import (
    InProcessEngine,
    SpectrumEncoder,
    clip,
    decoded,
    new_speaker,
    prepare,
    ref_of,
    wanted,
    worker_speakers,
    worker_with,
)
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints import metrics
from vllm_tts_cache.entrypoints.metrics import PREFIX, Metrics, MetricsRefresh
from vllm_tts_cache.entrypoints.speakers.served_model import ServedModel
from vllm_tts_cache.errors import EncodeError, SpeakerNotFoundError, StorageFullError
from vllm_tts_cache.speaker.rpc_client import AsyncWorkers
from vllm_tts_cache.store.opening import open_store

ROOT = Path(__file__).parents[2]


class Scrape:
    def __init__(self, registry):
        text = generate_latest(registry).decode()
        families = text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]

    def __call__(self, name, **labels):
        """The sum of the series of this name that have these labels."""
        named = (sample for sample in self.samples if sample.name == PREFIX + name)
        found = [s.value for s in named if labels.items() <= s.labels.items()]
        assert found, f"there is no {name} of {labels}"
        return sum(found)


class Rig:
    def __init__(self, directory, **settings):
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.settings = Settings(samples_dir=directory, **settings)
        self.store = open_store(self.settings)
        self.encoders = [SpectrumEncoder("codec")]
        self.speakers = worker_speakers(directory, self.encoders)
        self.engine = InProcessEngine(worker_with(self.speakers))
        self.refresher = self.refresher_of(self.metrics)

    def refresher_of(self, metrics, shared_with=None):
        workers = AsyncWorkers(self.engine)
        model = ServedModel(family=lambda: None, refusal=lambda: None, note=str)
        looked_at = self.store, lambda: workers, model
        return MetricsRefresh(metrics, *looked_at, lambda: 3, shared_with)

    def register(self, name, seed=0):
        audio = clip(seed=seed)
        self.store.registrations.register(new_speaker(name, audio), decoded(audio))
        return ref_of(audio)

    @property
    def scrape(self):
        return Scrape(self.registry)

    def close(self):
        self.refresher.shutdown()
        self.speakers.close()
        self.store.close()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_a_request_is_counted_once_by_what_it_found():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.begin_family("tiny")
    with metrics.request("tiny") as counted:
        counted.outcome = "miss"
        counted.outcome = "hit"  # it was resolved again
    with metrics.request("tiny"):
        pass
    for error in (SpeakerNotFoundError("Ann"), StorageFullError()):
        with pytest.raises(type(error)), metrics.request("tiny") as counted:
            counted.outcome = "miss"
            raise error
    with pytest.raises(asyncio.CancelledError), metrics.request("tiny"):
        raise asyncio.CancelledError
    scrape = Scrape(registry)
    outcomes = {"hit": 1, "miss": 0, "none": 1, "failed": 2}
    for outcome, number in outcomes.items():
        assert scrape("requests_total", outcome=outcome, family="tiny") == number
    told = {"SpeakerNotFoundError": "client", "StorageFullError": "server"}
    for reason, fault in told.items():
        assert scrape("requests_failed_total", reason=reason, fault=fault) == 1


async def test_what_a_worker_did_is_shown_once_however_often_it_is_asked(rig):
    ref = rig.register("Ann")
    prepare(rig.speakers, ref, ["codec"])
    for _ in range(3):
        rig.speakers.prompt(ref, ["codec"])
        rig.speakers.num_prompts += 1
    for _ in range(3):
        await rig.refresher.refresh()
    scrape = rig.scrape
    assert scrape("hits_total", tier="memory") == 3
    assert scrape("prompts_total") == 3
    assert scrape("encodes_total", encoder="codec", outcome="done") == 1
    assert scrape("encodes_total", encoder="codec", outcome="failed") == 0
    for name in ("encode_seconds", "encode_queue_seconds"):
        found = scrape(f"{name}_count", encoder="codec", lane="registered")
        assert found == 1
    held = scrape("stored_bytes", tier="memory", segment="registered")
    assert 0 < held < scrape("stored_max_bytes", tier="memory", segment="registered")
    assert scrape("voices") == 1
    assert scrape("stored_bytes", tier="disk", content="audio") > 0
    assert scrape("stored_bytes", tier="disk", content="encodings") > 0
    assert scrape("deletions_unfinished") == 0
    assert scrape("encodings_awaited") == 3
    assert scrape("workers_seen_timestamp_seconds") > 0
    rig.speakers.prompt(ref, ["codec"])
    await rig.refresher.refresh()
    assert rig.scrape("hits_total", tier="memory") == 4


async def test_encodes_are_timed_and_failures_counted(rig):
    ref = rig.register("Ann")
    (encoder,) = rig.encoders
    encoder.errors.append(EncodeError("no"))
    prepare(rig.speakers, ref, ["codec"])
    other = rig.register("Bob", seed=1)
    encoder.gate.clear()
    encoder.entered.clear()
    wanted(rig.speakers, other, ["codec"])
    assert encoder.entered.wait(10)
    third = rig.register("Cid", seed=2)
    wanted(rig.speakers, third, ["codec"])
    await rig.refresher.refresh()
    assert rig.scrape("encodes_in_flight") == 2
    assert rig.scrape("encodes_waiting", lane="registered") == 1
    await asyncio.sleep(0.06)
    encoder.gate.set()
    prepare(rig.speakers, third, ["codec"])
    await rig.refresher.refresh()
    scrape = rig.scrape
    assert scrape("encodes_total", outcome="failed") == 1
    assert scrape("encodes_total", outcome="done") == 2
    assert scrape("encode_seconds_count") == 2
    assert scrape("encode_seconds_sum") >= 0.06
    assert scrape("encode_queue_seconds_sum") >= 0.06, "the third waited for the second"
    assert scrape("encodes_in_flight") == 0


async def test_counts_go_on_when_a_worker_is_started_anew(rig):
    ref = rig.register("Ann")
    prepare(rig.speakers, ref, ["codec"])
    rig.speakers.prompt(ref, ["codec"])
    await rig.refresher.refresh()
    rig.speakers.close()
    rig.speakers = worker_speakers(rig.settings.samples_dir, rig.encoders)
    rig.engine.workers = (worker_with(rig.speakers),)
    rig.speakers.prompt(ref, ["codec"])
    await rig.refresher.refresh()
    assert rig.scrape("hits_total", tier="memory") == 1
    assert rig.scrape("hits_total", tier="disk") == 1
    assert rig.scrape("encodes_total", outcome="done") == 1


async def test_of_several_ranks_the_first_counts_and_all_remember(rig):
    ref = rig.register("Ann")
    prepare(rig.speakers, ref, ["codec"])
    rig.speakers.prompt(ref, ["codec"])
    await rig.refresher.refresh()
    held = rig.scrape("stored_bytes", tier="memory", segment="registered")
    (first,) = rig.engine.workers
    rig.engine.workers = (first, worker_with(rig.speakers, rank=1))
    await rig.refresher.refresh()
    assert rig.scrape("hits_total") == 1
    assert rig.scrape("encodes_in_flight") == 0
    twice = rig.scrape("stored_bytes", tier="memory", segment="registered")
    assert twice == 2 * held


async def test_the_background_goes_on_after_an_error(rig, monkeypatch):
    monkeypatch.setattr(metrics, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(metrics, "PAUSE_OF_ANSWERS", 0)
    workers, rig.engine.workers = rig.engine.workers, ()
    rig.refresher.start()
    while not rig.engine.calls:
        await asyncio.sleep(0.01)
    rig.engine.workers = workers
    while not rig.scrape("workers_seen_timestamp_seconds"):
        await asyncio.sleep(0.01)


PROCESS = """
import asyncio, sys, time
from pathlib import Path
from prometheus_client import REGISTRY
from tests.unit.test_metrics import Rig
from vllm_tts_cache.config import metrics_directory
from vllm_tts_cache.entrypoints.metrics import process_metrics

async def main():
    samples, ready, go = map(Path, sys.argv[1:4])
    rig = Rig(samples)
    for _ in range(5):
        rig.speakers.num_prompts += 1
    metrics = process_metrics()
    for _ in range(10):
        with metrics.request("tiny") as counted:
            counted.outcome = "hit"
    refresher = rig.refresher_of(metrics, metrics_directory())
    await refresher.refresh()
    ready.touch()
    while not go.exists():
        time.sleep(0.01)
    refresher.shutdown()
    rig.close()

asyncio.run(main())
"""


@pytest.mark.long  # each of them imports what a worker has
def test_several_api_processes_add_up_and_one_of_them_asks_the_workers(tmp_path):
    """As with --api-server-count: the host reads one directory for all of them."""
    from prometheus_client.multiprocess import MultiProcessCollector

    shared, go = tmp_path / "shared", tmp_path / "go"
    shared.mkdir()
    readies = [tmp_path / f"ready-{number}" for number in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path / "voices"), ready, go],
            env={
                **os.environ,
                "PROMETHEUS_MULTIPROC_DIR": str(shared),
                "PYTHONPATH": str(ROOT),
            },
        )
        for ready in readies
    ]
    try:
        while not all(ready.exists() for ready in readies):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(shared))
        scrape = Scrape(registry)
        assert scrape("requests_total", outcome="hit", family="tiny") == 20
        assert scrape("prompts_total") == 5, "one of them shows its worker"
        assert scrape("encodings_awaited") == 6
        assert scrape("stored_max_bytes", tier="memory", segment="inline") == (
            Settings().memory_max_bytes * Settings().inline_share
        )
    finally:
        go.touch()
        codes = [process.wait(60) for process in processes]
    assert codes == [0, 0]
    scrape = Scrape(registry)
    assert scrape("requests_total", outcome="hit") == 20, "what ended stays counted"
    assert scrape("prompts_total") == 5
