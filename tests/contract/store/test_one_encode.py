"""One cold key, many callers, one encode."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.encoding_samples import REGISTERED, ROOMY, make_encoding, make_key
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.flights import FileFlights
from vllm_tts_cache.store.tiers.disk import DiskTier
from vllm_tts_cache.store.tiers.memory import MemoryTier

WORKER = """
import os, sys, time
from pathlib import Path
from tests.encoding_samples import REGISTERED, ROOMY, make_encoding, make_key
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.flights import FileFlights
from vllm_tts_cache.store.tiers.disk import DiskTier
from vllm_tts_cache.store.tiers.memory import MemoryTier

root = Path(sys.argv[1])
tiers = [MemoryTier(ROOMY), DiskTier(root / "encodings", ROOMY)]
cache = EncodingCache(tiers, FileFlights(root / "locks"))

def encode():
    (root / f"encoded-by-{os.getpid()}").touch()
    time.sleep(0.2)
    return make_encoding()

print("ready", flush=True)
sys.stdin.readline()
print(cache.get_or_encode(make_key(), REGISTERED, encode)["codes"].tobytes().hex())
"""


@pytest.mark.parametrize("depth", [1, 2], ids=["memory", "memory and disk"])
def test_eight_threads_on_one_cold_key_encode_once(tmp_path, depth):
    tiers = [MemoryTier(ROOMY), DiskTier(tmp_path / "encodings", ROOMY)][:depth]
    cache = EncodingCache(tiers, FileFlights(tmp_path / "locks"))

    def encode():
        time.sleep(0.05)
        return make_encoding()

    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(cache.get_or_encode, make_key(), REGISTERED, encode)
            for _ in range(8)
        ]
        codes = {call.result(10)["codes"].tobytes() for call in calls}
    assert codes == {make_encoding()["codes"].tobytes()}
    assert cache.snapshot().encodes == 1


def test_four_processes_on_one_cold_key_encode_once(tmp_path):
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = {worker.communicate(timeout=30)[0].strip() for worker in workers}
    assert answers == {make_encoding()["codes"].tobytes().hex()}
    assert len(list(tmp_path.glob("encoded-by-*"))) == 1
    assert DiskTier(tmp_path / "encodings", ROOMY).verify(0) == []
