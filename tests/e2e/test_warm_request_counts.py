"""What a request for a voice that is known does not do, counted in the server."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import warm_request_probe
from vllm_tts_cache.speaker.family import CloneFacts
from vllm_tts_cache.testing.server import SpeechClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.every_family]

SHORT, LONG = 3.0, 25.0
NUM_REQUESTS = 3


@dataclass
class Probed:
    """A server that says what its processes do."""

    client: SpeechClient
    log: Path

    def seen(self, act):
        """What happened meanwhile, as (thread, kind, what)."""
        already = self.log.stat().st_size
        act()
        lines = self.log.read_bytes()[already:].splitlines()
        told = map(json.loads, lines)
        return [(each["thread"], each["kind"], each["what"]) for each in told]

    def speak(self, **fields):
        spoken = self.client.speak("Hello there.", **fields)
        assert spoken.status == 200 and spoken.audio
        return spoken


@pytest.fixture(scope="module")
def probed(shared_server):
    log = Path(shared_server.options.environ[warm_request_probe.VARIABLE])
    probed = Probed(SpeechClient(shared_server.url), log)
    yield probed
    probed.client.close()


@pytest.fixture(scope="module")
def voices(probed, make_clip):
    """Seconds of reference -> a voice that is warm, as is the server.

    It has been spoken with: where the API process needs a voice's codes, it reads
    them for the first request and keeps them in memory.
    """
    names = {SHORT: "short", LONG: "long"}
    for seconds, name in names.items():
        probed.client.register(name, make_clip(seconds), ref_text="Hello there.")
        probed.client.precompute(name).raise_for_status()
        for _ in range(NUM_REQUESTS):
            probed.speak(voice=name)
    return names


def kinds(seen, kind):
    return [what for _, seen_kind, what in seen if seen_kind == kind]


TIDYING = ("tts-cache: a round", "tts-cache: a look", "tts-cache: removing files")


def opened_for_requests(seen):
    """Neither what the host passes chunks through, nor what is tidied up at times."""
    return [
        path
        for thread, kind, path in seen
        if kind == "open"
        and Path(path).parent != Path("/dev/shm")
        and not thread.startswith(TIDYING)
    ]


def test_the_api_process_waits_for_outputs_and_does_not_look_for_them(shared_server):
    """It was to, and did not: an engine asks for that before it loads plugins."""
    log = shared_server.options.log_path.read_text()
    assert "Event-driven orchestration loop enabled" in log


def test_the_probe_sees_what_a_cold_request_does(probed, voices, family, make_clip):
    probed.client.register("cold", make_clip(), ref_text="Hello there.")
    before = probed.client.encodes()
    seen = probed.seen(lambda: probed.speak(voice="cold"))
    after = probed.client.encodes()
    used = family.mode(CloneFacts(stored_transcript=True)).encoders
    assert {name: after[name] - before[name] for name in after} == {
        name: int(name in used) for name in family.encoders
    }
    assert "tts_cache_want" in kinds(seen, "rpc")
    opened = opened_for_requests(seen)
    assert any(path.endswith("/audio.safetensors") for path in opened)
    assert kinds(seen, "message")


def test_a_warm_request_encodes_calls_and_opens_nothing(probed, voices):
    def speak():
        for name in voices.values():
            for _ in range(NUM_REQUESTS):
                assert probed.speak(voice=name).cache == "hit"

    before = probed.client.encodes()
    seen = probed.seen(speak)
    assert probed.client.encodes() == before
    # What the metrics ask every few seconds is of no request.
    assert set(kinds(seen, "rpc")) <= {"tts_cache_stats", "tts_cache_decoder_stats"}
    assert opened_for_requests(seen) == []


def test_a_warm_message_is_small_and_flat_in_the_clips_length(probed, voices, case):
    sizes = {}
    for seconds, name in voices.items():
        seen = probed.seen(lambda name=name: probed.speak(voice=name))
        sizes[seconds] = max(kinds(seen, "message"))  # a stage may get one each
    assert max(sizes.values()) <= case.message_max_bytes
    grown = sizes[LONG] - sizes[SHORT]
    assert grown <= math.ceil(case.message_bytes_per_second * (LONG - SHORT))
