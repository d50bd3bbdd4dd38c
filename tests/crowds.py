"""Many clients on one server, some of whom hang up."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from vllm_tts_cache.testing.server import SpeechClient

CROWD_TEXTS = ("Hello there.", "Something else is said now, and it is longer.")


def kv_counter(client, name):
    """A counter of vLLM's own for the stage that prefills."""
    pattern = rf'^vllm:{name}_total\{{.*stage="0".*\}} (\S+)$'
    found = re.findall(pattern, client.http.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def prefix_tokens(client, speak):
    """What ``speak`` gives, and how many prompt tokens it had and found in the KV."""
    before = settled(client)
    spoken = speak()
    assert spoken.status == 200, spoken.audio
    had, found = (now - was for now, was in zip(settled(client), before, strict=True))
    return spoken, had, found


def settled(client):
    """The counters of prompt tokens, which are told a while after an answer."""
    names = ("prefix_cache_queries", "prefix_cache_hits")
    last = None
    while last != (now := [kv_counter(client, name) for name in names]):
        last = now
        time.sleep(0.4)
    return now


def speak_briefly(client, voice, text):
    spoken = client.speak(text, voice=voice, max_new_tokens=16)
    assert spoken.status == 200, spoken.audio
    return spoken.audio


def crowd(server, expected):
    """Six clients at once, every third request hung up on; all hear what is due."""
    requests, failures = list(expected), []

    def run(seed):
        client, order = SpeechClient(server.url), np.random.default_rng(seed)
        for number in range(3):
            request = requests[order.integers(len(requests))]
            if number == 2:
                hang_up(client, *request)
            elif speak_briefly(client, *request) != expected[request]:
                failures.append(request)
        client.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(6)))
    assert not failures


def hang_up(client, voice, text):
    with pytest.raises(httpx.ReadTimeout):
        client.http.post(
            "/v1/audio/speech",
            json={"model": "tts", "input": text, "voice": voice, "stream": True},
            timeout=0.05,
        )
