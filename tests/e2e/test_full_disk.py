"""A disk that fills up under a server."""

import resource

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes
from vllm_tts_cache.testing.server import data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


def noise(seconds, container):
    """A clip that no codec makes small."""
    samples = np.random.default_rng(7).uniform(-0.5, 0.5, int(seconds * 48_000))
    return sndfile_bytes(samples.astype(np.float32), 48_000, container)


def test_a_full_disk_refuses_uploads_and_nothing_else(client, shared_server, make_clip):
    client.register("present", make_clip(), ref_text="Hello there.")
    heard = client.speak(voice="present")
    before = client.stats()["registry"]
    limits = resource.prlimit(shared_server.pid, resource.RLIMIT_FSIZE)
    # No file may grow past this: the kernel refuses the write itself. The one clip is
    # refused where it is stored, the other, which is spooled, where it is received.
    most = 600_000
    flac, wav = noise(10.0, "FLAC"), noise(20.0, "WAV")
    assert most < len(flac) < 1 << 20 < len(wav)
    resource.prlimit(shared_server.pid, resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        refused = client.register("absent", flac)
        replaced = client.register("present", flac)
        received = client.register("absent", wav)
        inline = client.speak(ref_audio=data_url(flac), x_vector_only_mode=True)
    finally:
        resource.prlimit(shared_server.pid, resource.RLIMIT_FSIZE, limits)
    answers = (refused, replaced, received)
    assert [answer.status_code for answer in answers] == [507] * 3
    assert inline.status == 507
    assert "no space left" in refused.json()["error"]["message"]
    assert client.stats()["registry"] == before
    assert client.speak(voice="absent").status == 400
    assert client.speak(voice="present").audio == heard.audio
    assert client.register("absent", flac).status_code == 200
