"""A server that is told to stop ends, and ends what it has begun as it was told to."""

import signal
import socket
import sqlite3
import threading
import time
from contextlib import closing

import httpx
import pytest

from tests.served import Servers
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.testing.server import HOST, SpeechClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

LONG = "Number one, said again and again. " * 12
ENDS_SECONDS = 25


class Speaking(threading.Thread):
    """Speaks a long text, a chunk at a time."""

    def __init__(self, url):
        super().__init__()
        self.has_begun = threading.Event()
        self.num_bytes, self.error = 0, None
        self._url = url
        self.start()

    def run(self):
        body = {"input": LONG, "voice": "Ada", "response_format": "pcm"}
        body |= {"stream": True, "stream_format": "audio"}
        try:
            with (
                closing(SpeechClient(self._url)) as client,
                client.http.stream("POST", "/v1/audio/speech", json=body) as answer,
            ):
                answer.raise_for_status()
                for chunk in answer.iter_bytes():
                    self.num_bytes += len(chunk)
                    self.has_begun.set()
        except httpx.HTTPError as exc:
            self.error = exc
        self.has_begun.set()


@pytest.fixture
def server_of(default_checkpoint, tmp_path, make_clip):
    servers = Servers(default_family(), default_checkpoint, tmp_path)

    def start(drain_seconds):
        server, client = servers.start(SPEAKER_DRAIN_SECONDS=drain_seconds)
        client.register("Ada", make_clip(2.0)).raise_for_status()
        client.precompute("Ada").raise_for_status()
        return server

    yield start
    servers.stop()


def participants(server):
    """Whom deletions wait for."""
    with closing(sqlite3.connect(server.options.samples_dir / FILE_NAME)) as db:
        return db.execute("SELECT id FROM participant").fetchall()


def stopped(server):
    """Tell it to stop as Ctrl-C does."""
    server._process.send_signal(signal.SIGINT)


def test_it_ends_soon_and_ends_what_speaks(server_of):
    server = server_of(0)
    speaking = [Speaking(server.url) for _ in range(3)]
    for each in speaking:
        assert each.has_begun.wait(60)
    began = time.monotonic()
    stopped(server)
    assert server._process.wait(ENDS_SECONDS) == 0
    for each in speaking:
        each.join(1)
    assert participants(server) == []
    assert [type(each.error) for each in speaking] == [httpx.RemoteProtocolError] * 3
    assert time.monotonic() - began < ENDS_SECONDS


def test_with_time_to_stop_it_takes_nothing_new_and_ends_what_it_has(server_of):
    server = server_of(120)
    speaking = [Speaking(server.url) for _ in range(2)]
    for each in speaking:
        assert each.has_begun.wait(60)
    with closing(SpeechClient(server.url)) as idle:
        assert idle.http.get("/health").status_code == 200
        stopped(server)
        time.sleep(1)
        assert server._process.poll() is None
        with socket.socket() as connection:
            assert connection.connect_ex((HOST, server.port)) != 0
        with pytest.raises(httpx.HTTPError):  # its connection was closed
            idle.http.get("/health")
    for each in speaking:
        each.join(120)
        assert each.error is None and each.num_bytes > 10_000
    assert server._process.wait(ENDS_SECONDS) == 0


def test_told_twice_it_waits_no_longer(server_of):
    server = server_of(600)
    speaking = Speaking(server.url)
    assert speaking.has_begun.wait(60)
    stopped(server)
    time.sleep(1)
    assert server._process.poll() is None
    stopped(server)
    assert server._process.wait(ENDS_SECONDS) == 0
    speaking.join(1)
    assert isinstance(speaking.error, httpx.RemoteProtocolError)
