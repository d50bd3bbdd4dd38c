"""Real servers on a tiny checkpoint, and clips to register."""

from dataclasses import replace

import pytest

from tests.audio_clips import sndfile_bytes, voiced
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.storage import open_storage
from vllm_tts_cache.testing.client import SpeechClient
from vllm_tts_cache.testing.server import Server, ServerOptions


@pytest.fixture(scope="session")
def shared_server(qwen3_checkpoint, tmp_path_factory):
    """One server for every test that neither restarts nor breaks it."""
    folder = tmp_path_factory.mktemp("shared")
    options = ServerOptions(
        model=qwen3_checkpoint,
        samples_dir=folder / "speakers",
        log_path=folder / "server.log",
    )
    with Server(options) as server:
        yield server


@pytest.fixture
def client(shared_server):
    client = SpeechClient(shared_server.url)
    yield client
    client.close()
    assert shared_server.is_healthy()


@pytest.fixture
def make_server(qwen3_checkpoint, tmp_path):
    """Servers of one test's own, on one storage directory; stopped at its end."""
    servers, clients = [], []

    def make(arguments=(), **environ):
        options = ServerOptions(
            model=qwen3_checkpoint,
            samples_dir=tmp_path / "speakers",
            log_path=tmp_path / "server.log",
            environ={name: str(value) for name, value in environ.items()},
        )
        arguments = (*options.arguments, *arguments)
        servers.append(Server(replace(options, arguments=arguments)).start())
        clients.append(SpeechClient(servers[-1].url))
        return servers[-1], clients[-1]

    yield make
    for client in clients:
        client.close()
    for server in servers:
        server.stop()


@pytest.fixture
def storage(tmp_path):
    """The storage directory of `make_server`, opened beside (or after) the server."""
    opened = open_storage(
        load_settings({"SPEAKER_SAMPLES_DIR": f"{tmp_path}/speakers"})
    )
    yield opened
    opened.registry.close()


@pytest.fixture(scope="session")
def make_clip():
    """A clip that no other test has: WAV bytes, unless another format is asked for."""
    pitches = iter(range(100, 2000, 7))

    def make(seconds=2.0, pitch_hz=None, **form):
        pitch_hz = next(pitches) if pitch_hz is None else pitch_hz
        samples = voiced(24_000, seconds, pitch_hz=pitch_hz)
        return sndfile_bytes(samples, 24_000, **form)

    return make
