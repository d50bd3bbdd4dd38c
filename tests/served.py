"""Real servers on a tiny checkpoint, and clips to register."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import server_plugins
from tests.audio_clips import sndfile_bytes, voiced
from tests.e2e import warm_request_probe
from tests.families.cases import case_of, cases, default_case
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.store.opening import open_existing
from vllm_tts_cache.testing.server import Server, ServerOptions, SpeechClient
from vllm_tts_cache.testing.tiny_checkpoint import serve_arguments

ROOT = Path(__file__).parents[1]


class _Running:
    """Servers that were started for the tests of one group."""

    def __init__(self):
        self._group = ""
        self._stops: list[Callable[[], None]] = []

    def add(self, stop: Callable[[], None]):
        self._stops.append(stop)

    def stop_others(self, group):
        """Stop what was started for another group: it would only take memory."""
        if group != self._group and self._stops:
            with ThreadPoolExecutor(len(self._stops)) as at_once:
                list(at_once.map(lambda stop: stop(), self._stops))
            self._stops.clear()
        self._group = group


running = _Running()


def pytest_generate_tests(metafunc):
    """Run on the default family; marked tests run on each that they are for."""
    names = [m.args[0] for m in metafunc.definition.iter_markers("parametrize")]
    if "family" in metafunc.fixturenames and "family" not in names:
        served = _cases_for(metafunc.definition)
        metafunc.parametrize(
            "family",
            [
                pytest.param(case.family, id=case.name, marks=_marks(case))
                for case in served
            ],
            scope="session",
        )


def _marks(case):
    """A server takes minutes of two cores: the default family's alone is not long."""
    return [] if case is default_case() else [pytest.mark.long]


def _cases_for(test):
    if (marker := test.get_closest_marker("does")) is not None:
        return [case for case in cases() if marker.args[0] in case.does]
    if test.get_closest_marker("every_family") is not None:
        return cases()
    return [default_case()]


@pytest.fixture(scope="session")
def case(family):
    """What tests know of the family."""
    return case_of(family)


@pytest.fixture(scope="session")
def checkpoint(family, tiny):
    """The tiny checkpoint of the family; do not write to it."""
    return tiny(family)


@pytest.fixture(scope="session")
def shared_server(family, case, checkpoint, tmp_path_factory):
    """One server for every test that neither restarts nor breaks it.

    The probe in it says what its processes do: `Probed` in the test that asks.
    """
    from vllm_omni.model_executor.models.registry import OmniModelRegistry

    from tests.real_talker import inspected_here

    with inspected_here():
        for name in (*family.models, *family.decoders):
            OmniModelRegistry.models[name].inspect_model_cls()
    folder = tmp_path_factory.mktemp("shared")
    server_plugins.announce(folder / "plugin", [warm_request_probe.__name__])
    options = ServerOptions(
        model=checkpoint,
        samples_dir=folder / "speakers",
        log_path=folder / "server.log",
        environ={
            "PYTHONPATH": f"{ROOT}:{folder / 'plugin'}",
            warm_request_probe.VARIABLE: str(folder / "seen.jsonl"),
            # Requests that nobody made would be counted beside those of the tests.
            "SPEAKER_CACHE_WARM_KV": "off",
        },
        arguments=(
            *serving(family, case.short_of_kv, folder),
            # Else no chat reaches a tiny checkpoint, which has no template of its own.
            "--trust-request-chat-template",
        ),
    )
    with Server(options) as server:
        running.add(server.stop)
        yield server


@pytest.fixture
def client(shared_server):
    client = SpeechClient(shared_server.url)
    yield client
    client.close()
    assert shared_server.is_healthy()


class Servers:
    """Servers one after another on one storage directory; the last one is stopped."""

    def __init__(self, family, checkpoint, folder):
        self.samples_dir = folder / "speakers"
        self._family, self._checkpoint, self._folder = family, checkpoint, folder
        self._server = self._client = None

    def start(self, arguments=(), *, stage_0=None, **environ):
        """Start one in the place of the one before; returns it and a client."""
        self.stop()
        options = ServerOptions(
            model=self._checkpoint,
            samples_dir=self.samples_dir,
            log_path=self._folder / "server.log",
            environ={name: str(value) for name, value in environ.items()},
            arguments=(*serving(self._family, stage_0 or {}, self._folder), *arguments),
        )
        self._server = Server(options).start()
        self._client = SpeechClient(self._server.url)
        return self._server, self._client

    def stop(self):
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.stop()
        self._server = self._client = None

    def problems(self, patience_seconds=30.0):
        """What `verify` finds; recovery runs beside serving, so it is waited for."""
        settings = load_settings({"SPEAKER_SAMPLES_DIR": str(self.samples_dir)})
        with closing(open_existing(settings)) as store:
            until = time.monotonic() + patience_seconds
            while (found := store.verify()) and time.monotonic() < until:
                time.sleep(0.2)
        return found


@pytest.fixture(scope="session")
def journey(family, checkpoint, tmp_path_factory):
    """The servers of a family's journey, whose tests follow one another."""
    own = Servers(family, checkpoint, tmp_path_factory.mktemp("journey"))
    running.add(own.stop)
    yield own
    own.stop()


def serving(family, stage_0, folder):
    """Its arguments with other values for stage 0: the host's own inheritance."""
    if not stage_0:
        return serve_arguments(family)
    overlay = {
        "base_config": str(family.deploy_file),
        "stages": [{"stage_id": 0, **stage_0}],
    }
    path = folder / "overlay.yaml"
    path.write_text(json.dumps(overlay))  # JSON is YAML
    return ("--omni", "--deploy-config", str(path))


@pytest.fixture(scope="session")
def make_clip():
    """A clip that no other test has: WAV bytes, unless another format is asked for."""
    pitches = iter(range(100, 2000, 7))

    def make(seconds=2.0, pitch_hz=None, **form):
        pitch_hz = next(pitches) if pitch_hz is None else pitch_hz
        samples = voiced(24_000, seconds, pitch_hz=pitch_hz)
        return sndfile_bytes(samples, 24_000, **form)

    return make
