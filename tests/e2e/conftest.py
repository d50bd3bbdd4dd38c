"""Real servers on a tiny checkpoint, and clips to register."""

import json

import pytest

from tests.audio_clips import sndfile_bytes, voiced
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.storage import open_storage
from vllm_tts_cache.testing.client import SpeechClient
from vllm_tts_cache.testing.families import FISH_SPEECH, QWEN3_TTS
from vllm_tts_cache.testing.server import Server, ServerOptions


def pytest_generate_tests(metafunc):
    """Run on Qwen3-TTS; a test marked with other families runs on each of them."""
    if "family" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("families")
        served = marker.args if marker else (QWEN3_TTS,)
        metafunc.parametrize(
            "family", served, ids=[f.name for f in served], scope="session"
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep a family's tests together: pytest's own grouping gives up at a second
    parameter, and each change of family starts a server.

    The hook sees the whole run; tests elsewhere may call another thing a family.
    """

    def runs_on_fish(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return params.get("family") == FISH_SPEECH

    items.sort(key=runs_on_fish)


@pytest.fixture(scope="session")
def checkpoint(family, request):
    """The tiny checkpoint of the family; do not write to it."""
    fixtures = {QWEN3_TTS.name: "qwen3_checkpoint"}
    fixtures[FISH_SPEECH.name] = "fish_speech_checkpoint"
    return request.getfixturevalue(fixtures[family.name])


@pytest.fixture(scope="session")
def shared_server(family, checkpoint, tmp_path_factory):
    """One server for every test that neither restarts nor breaks it."""
    folder = tmp_path_factory.mktemp("shared")
    options = ServerOptions(
        model=checkpoint,
        samples_dir=folder / "speakers",
        log_path=folder / "server.log",
        arguments=family.arguments,
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
def make_server(family, checkpoint, tmp_path):
    """Servers of one test's own, on one storage directory; stopped at its end."""
    servers, clients = [], []

    def make(arguments=(), *, stage_0=None, **environ):
        deploy_file = overlaid(family.deploy_file, stage_0 or {}, tmp_path)
        options = ServerOptions(
            model=checkpoint,
            samples_dir=tmp_path / "speakers",
            log_path=tmp_path / "server.log",
            environ={name: str(value) for name, value in environ.items()},
            arguments=("--omni", "--deploy-config", str(deploy_file), *arguments),
        )
        servers.append(Server(options).start())
        clients.append(SpeechClient(servers[-1].url))
        return servers[-1], clients[-1]

    yield make
    for client in clients:
        client.close()
    for server in servers:
        server.stop()


def overlaid(deploy_file, stage_0, folder):
    """The deploy file with other values for stage 0: the host's own inheritance."""
    if not stage_0:
        return deploy_file
    overlay = {
        "base_config": str(deploy_file),
        "stages": [{"stage_id": 0, **stage_0}],
    }
    path = folder / "overlay.yaml"
    path.write_text(json.dumps(overlay))  # JSON is YAML
    return path


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
