"""What needs no server: the cache, content addresses, loading."""

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.bench import SAMPLE_RATE_HZ, Bench
from benchmarks.measure import (
    AtMost,
    RatioAtMost,
    Row,
    Summary,
    each_us,
    per_call_us,
    percentile,
)
from benchmarks.storage import (
    REGISTERED,
    OurStorage,
    encoding_of,
    key_of,
    noise,
    speaker_name,
)
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.store.encoding import EncodingKey

NAME = "core"
ENCODING_KIB = (1, 10, 100)
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
        bench.step(f"{NAME}: loading")
        found += _load()
    return found


def _memory(directory: Path, bench: Bench) -> list[Row]:
    storage = OurStorage(directory / "memory")
    keys = [_stored(storage, number, kib=10) for number in range(256)]
    turn = iter(range(1 << 62))

    def hit() -> None:
        assert storage.get(keys[next(turn) % 256], REGISTERED) is not None

    samples = per_call_us(hit, 20 * bench.num_rounds)
    storage.close()
    return [Row("memory hit", "us", Summary.of(samples), target=AtMost(5))]


def _disk(directory: Path, bench: Bench) -> list[Row]:
    storage = OurStorage(directory / "disk")
    found = []
    for kib in ENCODING_KIB:
        key = _stored(storage, kib, kib)
        path = storage.path(key)

        def hit(key: EncodingKey = key) -> None:
            assert storage.read(key) is not None

        def read(path: Path = path) -> None:
            path.read_bytes()

        ours, plain = each_us([hit, read], 200 * bench.num_rounds)
        found.append(
            Row(
                f"disk hit, {kib} KiB",
                "us",
                _by_round(ours, bench, 50),
                _by_round(plain, bench, 50),
                versus="plain read",
                target=RatioAtMost(2.0),
                note="in the page cache",
            )
        )
    storage.close()
    return found


def _stored(storage: OurStorage, number: int, kib: int) -> EncodingKey:
    """A registered voice's encoding of about that size."""
    audio = noise(number)
    storage.register(speaker_name(number), audio)
    key = key_of(audio.audio_sha256, "codec")
    storage.put(key, encoding_of(audio.audio_sha256, "codec", 512 * kib), REGISTERED)
    return key


def _key() -> Row:
    samples = np.random.default_rng(0).uniform(-1, 1, KEY_SECONDS * SAMPLE_RATE_HZ)
    mono = samples.astype(np.float32)
    (took,) = each_us([lambda: ReferenceAudio.of(mono, SAMPLE_RATE_HZ)], 20)
    (plain,) = each_us([lambda: hashlib.sha256(mono.data).digest()], 20)
    return Row(
        f"content address, {KEY_SECONDS} s at 44.1 kHz",
        "ms",
        Summary.of([us / 1e3 for us in took]),
        Summary.of([us / 1e3 for us in plain]),
        versus="SHA-256 alone",
        target=AtMost(15),
    )


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
            "loading the plugin where no speech is served",
            "ms",
            extra,
            target=AtMost(50),
            note="above the same process without it",
        )
    ]


def _by_round(samples: list[float], bench: Bench, share: float) -> Summary:
    parts = np.array_split(np.array(samples), bench.num_rounds)
    return Summary.of([percentile(list(part), share) for part in parts])
