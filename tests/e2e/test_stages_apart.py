"""The talker's stage on another machine than the API server, and twice on one.

Two machines are two directories here: what goes between stages goes through the host's
shared memory, and that a worker cannot read the server's directory is what is tested.
"""

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest

from tests.served import serving
from tests.store_samples import traces
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.testing.server import (
    HOST,
    Server,
    ServerOptions,
    SpeechClient,
    free_port,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

SPOKEN = "Hello there."


@pytest.fixture(scope="module")
def shared(postgres, object_server, tmp_path_factory):
    """A folder of two machines, and what both are told of catalogue and bucket."""
    folder = tmp_path_factory.mktemp("apart")
    return SimpleNamespace(
        folder=folder,
        environ={
            "SPEAKER_CATALOGUE_URL": postgres.url_of(folder),
            "SPEAKER_STORE_URL": object_server.url(folder.name),
            **object_server.environment,
        },
        objects=lambda: object_server.files(f"{folder.name}/objects"),
    )


class Talker:
    """The process that runs stage 0 for the server on the other machine."""

    def __init__(self, options: ServerOptions):
        self._server = Server(options)  # its command, without what waits for it
        self._process: subprocess.Popen[bytes] | None = None

    def start(self):
        with self._server.options.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._server.command(), "--headless"],
                env=self._server.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self):
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def apart(shared, default_checkpoint):
    where = ("--omni-master-address", HOST, "--omni-master-port", str(free_port()))

    def options(name, stage_id):
        return ServerOptions(
            model=default_checkpoint,
            samples_dir=shared.folder / name,
            log_path=shared.folder / f"{name}.log",
            environ=shared.environ,
            arguments=(
                *serving(default_family(), {}, shared.folder),
                *("--stage-id", str(stage_id), *where),
            ),
        )

    talker, server = Talker(options("talker", 0)), Server(options("server", 1))
    with ExitStack() as ended:
        ended.callback(talker.kill)
        ended.callback(server.stop)
        talker.start()
        server.start()
        client = SpeechClient(server.url)
        ended.callback(client.close)
        both = {"talker": talker, "server": server}
        yield SimpleNamespace(**both, client=client, folder=shared.folder)


def test_a_talker_with_another_directory_speaks_what_is_registered(apart, make_clip):
    apart.client.register("Ada", make_clip(3.0), ref_text=SPOKEN).raise_for_status()
    apart.client.precompute("Ada").raise_for_status()
    spoken = [apart.client.speak(voice="Ada") for _ in range(3)]
    assert {(s.status, s.cache) for s in spoken} == {(200, "hit")}
    assert len({s.audio for s in spoken}) == 1
    assert set(apart.client.encodes().values()) == {1}


def test_a_delete_leaves_nothing_on_either_machine(apart, shared, make_clip):
    client = apart.client
    client.register("Bea", make_clip(2.0), ref_text=SPOKEN).raise_for_status()
    assert client.speak(voice="Bea").status == 200
    shown = client.http.get("/v1/audio/voices/Bea").json()["voice"]
    sha = shown["audio_sha256"]
    assert traces(apart.folder / "talker", sha)  # its copies
    assert client.http.delete("/v1/audio/voices/Bea").status_code == 200
    for name in ("talker", "server"):
        assert traces(apart.folder / name, sha) == []
    assert [str(path) for path in shared.objects() if sha in str(path)] == []
    assert client.speak(voice="Bea").status == 400


def test_without_its_talker_a_server_says_so_and_still_deletes(apart):
    apart.talker.kill()
    until = time.monotonic() + 120
    while apart.server.is_healthy():
        assert time.monotonic() < until
        time.sleep(0.5)
    while apart.client.http.delete("/v1/audio/voices/Ada").status_code == 503:
        assert time.monotonic() < until
    assert apart.client.speak(voice="Ada").status in (400, 503)


@pytest.fixture(scope="module")
def doubled(default_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("doubled")
    replicas = {"num_replicas": 2, "devices": "0,1"}
    options = ServerOptions(
        model=default_checkpoint,
        samples_dir=folder / "speakers",
        log_path=folder / "server.log",
        arguments=serving(default_family(), replicas, folder),
    )
    with Server(options) as server, ExitStack() as closed:
        client = SpeechClient(server.url)
        closed.callback(client.close)
        yield SimpleNamespace(server=server, client=client)


def test_replicas_of_the_talker_share_what_one_has_encoded(doubled, make_clip):
    client = doubled.client
    client.register("Ada", make_clip(3.0), ref_text=SPOKEN).raise_for_status()
    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda _: client.speak(voice="Ada"), range(4)))
    spoken = [client.speak(voice="Ada") for _ in range(8)]
    assert {s.status for s in (*first, *spoken)} == {200}
    assert len({s.audio for s in (*first, *spoken)}) == 1
    assert len(client.stats()["workers"]) == 2
    assert min(worker["prompts"] for worker in client.stats()["workers"]) > 0
    assert set(client.encodes().values()) == {1}


def test_a_delete_reaches_every_replica_of_the_talker(doubled, make_clip):
    client = doubled.client
    client.register("Bea", make_clip(2.0), ref_text=SPOKEN).raise_for_status()
    assert {client.speak(voice="Bea").status for _ in range(6)} == {200}

    def entries():
        workers = client.stats()["workers"]
        return [worker["tiers"]["memory"]["entries"] for worker in workers]

    before = entries()
    assert client.http.delete("/v1/audio/voices/Bea").status_code == 200
    assert all(now < then for now, then in zip(entries(), before, strict=True))


def test_without_one_replica_of_the_talker_the_other_speaks_and_deletes(doubled):
    client = doubled.client
    talkers = [
        child
        for child in psutil.Process(doubled.server.pid).children(recursive=True)
        if "stage0" in child.name()
    ]
    talkers[0].kill()
    until = time.monotonic() + 60
    while len(client.stats()["workers"]) > 1:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert {client.speak(voice="Ada").status for _ in range(4)} == {200}
    assert client.http.delete("/v1/audio/voices/Ada").status_code == 200
    assert doubled.server.is_healthy()
