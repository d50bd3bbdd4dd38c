"""What needs no server: the cache, content addresses, the registry, loading."""

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.bench import Bench
from benchmarks.clips import SAMPLE_RATE_HZ
from benchmarks.many_voices import speaker_name, write_rows
from benchmarks.rows import AtMost, RatioAtMost, Row, Summary, percentile
from benchmarks.timing import each_us, per_call_us
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.registry import Registry
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey, Segment
from vllm_tts_cache.store.wiring import open_cache, open_disk

NAME = "core"
ENCODING_KIB = (1, 10, 100)
NUM_SPEAKERS = (100, 10_000, 100_000)
QUICK_NUM_SPEAKERS = NUM_SPEAKERS[:2]
KEY_SECONDS = 30
NUM_PROCESSES = 10


def run(bench: Bench) -> list[Row]:
    # On the disk that the servers use, not on a memory file system.
    with tempfile.TemporaryDirectory(dir=bench.work) as name:
        directory = Path(name)
        bench.step(f"{NAME}: encodings")
        found = [*_memory(directory, bench), *_disk(directory, bench)]
        bench.step(f"{NAME}: content address")
        found.append(_key())
        for num_speakers in bench.pick(full=NUM_SPEAKERS, quick=QUICK_NUM_SPEAKERS):
            bench.step(f"{NAME}: {num_speakers} speakers")
            found += _lookup(directory / f"{num_speakers}", num_speakers, bench)
        bench.step(f"{NAME}: loading")
        found += _load()
    return found


def _memory(directory: Path, bench: Bench) -> list[Row]:
    cache = open_cache(load_settings({"SPEAKER_SAMPLES_DIR": f"{directory}/memory"}))
    keys = [_encoding_key(number) for number in range(256)]
    for key in keys:
        cache.put(key, _encoding(10), Segment.REGISTERED)
    turn = iter(range(1 << 62))

    def hit() -> None:
        assert cache.get(keys[next(turn) % 256], Segment.REGISTERED) is not None

    samples = per_call_us(hit, 20 * bench.num_rounds)
    return [
        Row(
            scenario=NAME,
            what="memory hit",
            unit="us",
            ours=Summary.of(samples),
            target=AtMost(5),
        )
    ]


def _disk(directory: Path, bench: Bench) -> list[Row]:
    disk = open_disk(load_settings({"SPEAKER_SAMPLES_DIR": f"{directory}/disk"}))
    found = []
    for kib in ENCODING_KIB:
        key = _encoding_key(kib)
        disk.put(key, _encoding(kib), Segment.REGISTERED)
        path = disk.path(key, Segment.REGISTERED)

        def hit(key: EncodingKey = key) -> None:
            assert disk.get(key, Segment.REGISTERED) is not None

        def read(path: Path = path) -> None:
            path.read_bytes()

        ours, plain = each_us([hit, read], 200 * bench.num_rounds)
        found.append(
            Row(
                scenario=NAME,
                what=f"disk hit, {kib} KiB",
                unit="us",
                ours=_by_round(ours, bench, 50),
                reference=_by_round(plain, bench, 50),
                versus="plain read",
                target=RatioAtMost(2.0),
                note="in the page cache",
            )
        )
    return found


def _key() -> Row:
    samples = np.random.default_rng(0).uniform(-1, 1, KEY_SECONDS * SAMPLE_RATE_HZ)
    mono = samples.astype(np.float32)
    (took,) = each_us([lambda: ReferenceAudio.of(mono, SAMPLE_RATE_HZ)], 20)
    (plain,) = each_us([lambda: hashlib.sha256(mono.data).digest()], 20)
    return Row(
        scenario=NAME,
        what=f"content address, {KEY_SECONDS} s at 44.1 kHz",
        unit="ms",
        ours=Summary.of([us / 1e3 for us in took]),
        reference=Summary.of([us / 1e3 for us in plain]),
        versus="SHA-256 alone",
        target=AtMost(15),
    )


def _lookup(directory: Path, num_speakers: int, bench: Bench) -> list[Row]:
    path = directory / "registry.sqlite3"
    write_rows(path, num_speakers)
    order = np.random.default_rng(0).integers(num_speakers, size=1 << 16)
    names = iter([speaker_name(int(number)) for number in order])
    with Registry(path, max_speakers=0, policy="overwrite") as registry:

        def look_up() -> None:
            assert registry.get(next(names)) is not None

        (samples,) = each_us([look_up], 1000 * bench.num_rounds)
    return [
        Row(
            scenario=NAME,
            what=f"registry lookup, {num_speakers:,} speakers, p{share}",
            unit="us",
            ours=_by_round(samples, bench, share),
            target=AtMost(1000) if share == 99 else None,
        )
        for share in (50, 99)
    ]


def _load() -> list[Row]:
    """Whole processes, because an import is paid once a process."""
    plain = "from importlib.metadata import entry_points, version; import logging"
    loading = (
        f"{plain}; (e,) = entry_points(group='vllm.general_plugins', name='tts_cache')"
        "; e.load()()"
    )
    samples: dict[str, list[float]] = {plain: [], loading: []}
    for number in range(NUM_PROCESSES + 1):
        for program, found in samples.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            if number:  # the first one reads the files from the disk
                found.append(1e3 * (time.perf_counter() - began))
    without = Summary.of(samples[plain])
    extra = Summary.of([took - without.median for took in samples[loading]])
    return [
        Row(
            scenario=NAME,
            what="loading the plugin where no speech is served",
            unit="ms",
            ours=extra,
            target=AtMost(50),
            note="above the same process without it",
        )
    ]


def _by_round(samples: list[float], bench: Bench, share: float) -> Summary:
    parts = np.array_split(np.array(samples), bench.num_rounds)
    return Summary.of([percentile(list(part), share) for part in parts])


def _encoding(kib: int) -> Encoding:
    codes = np.random.default_rng(kib).integers(0, 2048, kib * 128, dtype=np.int64)
    return Encoding({"codes": codes})


def _encoding_key(number: int) -> EncodingKey:
    address = hashlib.sha256(str(number).encode()).hexdigest()
    return EncodingKey(audio_sha256=address, encoder_fingerprint="f" * 64)
