"""Processes that do one thing that a server does, and nothing else.

``python -m benchmarks.fresh_process start SIDE DIR`` opens a storage directory as an
API process does and looks voices up; ``... churn DIR`` lets voices come, speak and go
on a small budget; ``... encoders CHECKPOINT DIR`` loads reference encoders as a start
does, with the hashes of weights that an earlier one left in the directory, if any.
Each prints JSON. A process of its own, because memory and imports are measured.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.measure import percentile

PAGE = 100
NUM_PAGES = 50
NUM_LOOK_UPS = 5_000

NUM_AT_ONCE = 8
CHECK_EVERY = 100
NUM_CLIPS = 1_200  # fewer than registrations: names share clips, inline ones too
NUM_NAMES = 800  # so some registrations replace a voice
MIN_VOICES = 600  # more than fit into memory
# Room for the voices, and not for all inline clips: there the disk evicts too.
DISK_MAX_BYTES = 128 * 1024**2
NUM_VALUES = {"speaker": 4_096, "codec": 61_440}


def start(side: str, directory: Path, num_starts: int) -> dict[str, Any]:
    """Milliseconds of each start, what follows the last, and the memory of it all."""
    opened = _opener(side, directory)
    rss_before, took, subject = machine.rss_bytes(), [], None
    for _ in range(num_starts):
        began = time.perf_counter()
        subject = opened()
        took.append(1e3 * (time.perf_counter() - began))
    followed = _follow(subject) if side == "ours" else {}
    return {"start_ms": took, **followed, "rss_bytes": machine.rss_bytes() - rss_before}


def _opener(side: str, directory: Path) -> Callable[[], Any]:
    """What opens it; imported before, since a start needs that without voices too."""
    if side == "ours":
        from benchmarks.storage import OurStorage, speaker_name

        def open_ours() -> OurStorage:
            storage = OurStorage(directory)
            storage.find(speaker_name(0))
            return storage

        return open_ours
    os.environ["SPEAKER_SAMPLES_DIR"] = str(directory)
    from vllm_omni.entrypoints.openai.serving_speech import OmniOpenAIServingSpeech

    def open_stock() -> Any:
        """The host's serving class, its speaker storage only: it opens every file."""
        serving = object.__new__(OmniOpenAIServingSpeech)
        serving._adapter = None  # type: ignore[assignment]
        serving._init_speaker_storage()
        return serving

    return open_stock


def _follow(storage: Any) -> dict[str, float]:
    """Recover, look voices up in any order, and list pages."""
    from benchmarks.storage import speaker_name

    began = time.perf_counter()
    storage.recover()
    recovered = time.perf_counter() - began
    num_voices = storage.count()
    order = np.random.default_rng(0).integers(max(1, num_voices), size=NUM_LOOK_UPS)
    look_ups, pages, after = [], [], ""
    for number in order.tolist():
        began = time.perf_counter()
        storage.find(speaker_name(number))
        look_ups.append(1e3 * (time.perf_counter() - began))
    for _ in range(NUM_PAGES):
        began = time.perf_counter()
        page = storage.page(PAGE, after)
        pages.append(1e3 * (time.perf_counter() - began))
        after = page[-1].name if page else ""
    return {
        "recover_seconds": recovered,
        "look_up_p50_ms": percentile(look_ups, 50),
        "look_up_p99_ms": percentile(look_ups, 99),
        "page_ms": percentile(pages, 50),
    }


class Churn:
    """Speaks, registers and deletes, several at a time."""

    def __init__(self, directory: Path, memory_max_bytes: int):
        from benchmarks import storage

        self._of = storage
        self.storage = storage.OurStorage(
            directory,
            memory_max_bytes=memory_max_bytes,
            memory_max_entries=1_000_000,  # bytes shall bind
            disk_max_bytes=DISK_MAX_BYTES,
            inline_audio_max_bytes=32 * 1024**2,
        )
        self.names: set[str] = set()

    def operate(self, random: random.Random) -> None:
        """One operation; speaks most often, deletes once there are many voices."""
        names = sorted(self.names.copy())
        weights = [10, 10, 72 if names else 0, 8 if len(names) >= MIN_VOICES else 0]
        (kind,) = random.choices(("register", "inline", "speak", "delete"), weights)
        clip = self._of.noise(random.randrange(NUM_CLIPS))
        match kind:
            case "register":
                name = f"voice {random.randrange(NUM_NAMES)}"
                self.storage.register(name, clip)
                self.names.add(name)
            case "inline":
                self.storage.keep_inline(clip)
                self._prompt(clip.audio_sha256, self._of.INLINE)
            case "speak":
                record = self.storage.find(random.choice(names))
                if record is not None and record.audio_sha256 is not None:
                    self._prompt(record.audio_sha256, self._of.REGISTERED)
            case "delete":
                self.delete(random.choice(names))

    def delete(self, name: str) -> None:
        self.names.discard(name)
        self.storage.delete(name)

    def _prompt(self, sha: str, segment: Any) -> None:
        for name, num_values in NUM_VALUES.items():
            key = self._of.key_of(sha, name)
            if (found := self.storage.get(key, segment)) is None:
                right = self._of.encoding_of(sha, name, num_values)
                self.storage.put(key, right, segment)
            elif found["values"].tobytes()[:32] != bytes.fromhex(sha):
                raise AssertionError(f"another clip's encoding: {key}")

    def left(self) -> dict[str, int]:
        """What is still there, after every voice was deleted."""
        found = self.storage.verify()
        for problem in found[:10]:
            print(problem, file=sys.stderr)
        return {
            "problems that verify finds": len(found),
            "rows": self.storage.count(),
            "files of registered voices": self.storage.num_registered_files(),
        }


def churn(subject: Churn, num_operations: int, seed: int) -> dict[str, Any]:
    """Operate in two halves, then delete every voice and see what is left."""
    # Of a fixed size and started at once: a thread that comes later is no leak.
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        list(pool.map(lambda _: time.sleep(0.1), range(NUM_AT_ONCE)))
        seen, began, largest = [_seen()], time.perf_counter(), 0
        for half in range(2):
            randoms = [random.Random(f"{seed} {half} {i}") for i in range(NUM_AT_ONCE)]
            each = num_operations // 2 // NUM_AT_ONCE

            def operate(random: random.Random, each: int = each) -> int:
                most = 0
                for number in range(each):
                    subject.operate(random)
                    if number % (CHECK_EVERY // NUM_AT_ONCE) == 0:
                        most = max(most, subject.storage.memory()[0])
                return most

            largest = max(largest, *pool.map(operate, randoms))
            seen.append(_seen())
        took = time.perf_counter() - began
    for name in sorted(subject.names):
        subject.delete(name)
    start, half, end = seen
    return {
        "operations_per_second": num_operations / took,
        "largest_memory_bytes": largest,
        "rss_growth_bytes": end["rss"] - start["rss"],
        "rss_growth_second_half_bytes": end["rss"] - half["rss"],
        "evictions": subject.storage.memory()[1],
        "left": {
            **subject.left(),
            "threads": end["threads"] - half["threads"],
            "descriptors": end["descriptors"] - half["descriptors"],
        },
    }


def encoders(checkpoint: Path, directory: Path) -> dict[str, float]:
    """Seconds of the load, without the imports that a server has anyway."""
    import torch

    from vllm_tts_cache.speaker.family import family_of_checkpoint
    from vllm_tts_cache.speaker.weight_hashes import remembered

    load = family_of_checkpoint(checkpoint).part("encoders_part")
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with remembered(directory):
        load(checkpoint, torch.device("cpu"))
    return {"seconds": time.perf_counter() - began}


def _seen() -> dict[str, int]:
    """This process at rest, without garbage and what the allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return {
        "rss": machine.rss_bytes(),
        "threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("start")
    command.add_argument("side", choices=("ours", "stock"))
    command.add_argument("directory", type=Path)
    command.add_argument("--starts", type=int, default=1)
    command = commands.add_parser("churn")
    command.add_argument("directory", type=Path)
    command.add_argument("num_operations", type=int)
    command.add_argument("memory_max_bytes", type=int)
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("encoders")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("directory", type=Path)
    given = parser.parse_args()
    if given.command == "start":
        found = start(given.side, given.directory, given.starts)
    elif given.command == "encoders":
        found = encoders(given.checkpoint, given.directory)
    else:
        subject = Churn(given.directory, given.memory_max_bytes)
        found = churn(subject, given.num_operations, given.seed)
        subject.storage.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
