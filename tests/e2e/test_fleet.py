"""Two complete servers behind nginx, which share PostgreSQL and a bucket alone.

The tests follow one another: at the end the bucket is away, and then one of the two.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.front import in_front_of
from tests.served import serving
from tests.store_samples import traces
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.store.opening import open_existing
from vllm_tts_cache.testing.server import Server, ServerOptions, SpeechClient, data_url

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

SPOKEN = "Hello there."
NUM_SPOKEN = 20


@pytest.fixture(scope="module")
def fleet(postgres, object_server, default_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    prefix = folder.name
    shared = {
        "SPEAKER_CATALOGUE_GRACE_SECONDS": "14",  # a DELETE waits for a killed server
        "SPEAKER_CATALOGUE_URL": postgres.url_of(folder),
        "SPEAKER_STORE_URL": object_server.url(prefix),
        **object_server.environment,
    }
    servers = [
        Server(
            ServerOptions(
                model=default_checkpoint,
                samples_dir=folder / name,
                log_path=folder / f"{name}.log",
                environ=shared,
                arguments=serving(default_family(), {}, folder),
            )
        )
        for name in ("one", "other")
    ]
    ports = [server.port for server in servers]
    try:
        for server in servers:  # the host lets one stage start at a time
            server.start()
        with in_front_of(ports) as url, ExitStack() as closed:

            def client_of(url):
                client = SpeechClient(url)
                closed.callback(client.close)
                return client

            yield SimpleNamespace(
                servers=servers,
                direct=[client_of(server.url) for server in servers],
                client=client_of(url),
                client_of=client_of,
                folder=folder,
                shared=shared,
                objects=lambda: object_server.files(f"{prefix}/objects"),
                object_server=object_server,
            )
    finally:
        for server in servers:
            server.stop()


def encodes_of(fleet):
    counts = [client.encodes() for client in fleet.direct]
    return {name: sum(each[name] for each in counts) for name in counts[0]}


def problems_of(fleet, name, monkeypatch):
    for variable, value in fleet.object_server.environment.items():
        monkeypatch.setenv(variable, value)
    where = {"SPEAKER_SAMPLES_DIR": str(fleet.folder / name)}
    store = open_existing(load_settings({**where, **fleet.shared}))
    try:
        return store.verify()
    finally:
        store.close()


def test_a_voice_is_encoded_once_in_the_fleet_and_speaks_alike_on_all(fleet, make_clip):
    fleet.client.register("Ada", make_clip(3.0), ref_text=SPOKEN).raise_for_status()
    with ThreadPoolExecutor(4) as pool:  # of both servers, before either has it
        first = list(pool.map(lambda _: fleet.client.speak(voice="Ada"), range(4)))
    assert {s.status for s in first} == {200}
    spoken = [fleet.client.speak(voice="Ada") for _ in range(NUM_SPOKEN)]
    assert {(s.status, s.cache) for s in spoken} == {(200, "hit")}
    assert len({s.audio for s in (*first, *spoken)}) == 1
    assert set(encodes_of(fleet).values()) == {1}
    # nginx passed them on in turns.
    prompts = [c.stats()["workers"][0]["prompts"] for c in fleet.direct]
    assert min(prompts) >= NUM_SPOKEN // 3


def test_what_is_made_on_one_server_is_loaded_by_the_other(fleet, make_clip):
    one, other = fleet.direct
    one.register("Bea", make_clip(2.0), ref_text=SPOKEN).raise_for_status()
    one.precompute("Bea").raise_for_status()
    num_encodes = encodes_of(fleet)
    spoken = other.speak(voice="Bea")
    assert (spoken.status, spoken.cache) == (200, "hit")
    assert spoken.audio == one.speak(voice="Bea").audio
    assert encodes_of(fleet) == num_encodes


def test_after_a_delete_on_one_neither_has_any_of_it(fleet, make_clip, monkeypatch):
    one = fleet.direct[0]
    one.register("Cyd", make_clip(2.0), ref_text=SPOKEN).raise_for_status()
    shown = one.http.get("/v1/audio/voices/Cyd").json()["voice"]
    assert {c.speak(voice="Cyd").status for c in fleet.direct} == {200}
    statuses, done = [], threading.Event()

    def keep_speaking(client):
        while not done.is_set():
            statuses.append(client.speak("Hello.", voice="Cyd").status)

    threads = [
        threading.Thread(target=keep_speaking, args=(client,))
        for client in (fleet.client_of(server.url) for server in fleet.servers)
    ]
    for thread in threads:
        thread.start()
    answer = one.http.delete("/v1/audio/voices/Cyd")
    done.set()
    for thread in threads:
        thread.join()
    assert answer.status_code == 200
    assert set(statuses) <= {200, 400}  # as stock answers for a voice that is none
    assert {c.speak(voice="Cyd").status for c in fleet.direct} == {400}
    sha = shown["audio_sha256"]
    assert [str(path) for path in fleet.objects() if sha in str(path)] == []
    for name in ("one", "other"):
        assert traces(fleet.folder / name, sha) == []
        assert problems_of(fleet, name, monkeypatch) == []


def test_without_the_bucket_what_is_warm_speaks_and_the_rest_says_why(fleet, make_clip):
    before = fleet.client.speak(voice="Ada").audio
    fleet.object_server.stop()
    try:
        spoken = [fleet.client.speak(voice="Ada") for _ in range(6)]
        inline = {"ref_audio": data_url(make_clip(1.5)), "ref_text": SPOKEN}
        said = {"input": "Hello.", **inline}
        refused = [
            fleet.client.register("Dan", make_clip(1.5)),
            fleet.client.http.post("/v1/audio/speech", json=said),
        ]
    finally:
        fleet.object_server.start()
    assert {(s.status, s.audio) for s in spoken} == {(200, before)}
    for answer in refused:
        assert answer.status_code == 503
        assert "object store" in answer.text
        assert int(answer.headers["retry-after"]) > 0
    fleet.client.register("Dan", make_clip(1.5)).raise_for_status()


def test_without_postgresql_only_what_is_warm_speaks(fleet, postgres, make_clip):
    before = fleet.client.speak(voice="Ada").audio
    postgres.stop()
    try:
        spoken = [fleet.client.speak("Hi.", voice="Ada") for _ in range(4)]
        refused = fleet.client.register("Eve", make_clip(1.5))
        unknown = fleet.client.speak("Hi.", voice="Nobody")
    finally:
        postgres.start()
    assert {s.status for s in spoken} == {200}
    assert [refused.status_code, unknown.status] == [503, 503]
    assert "PostgreSQL" in refused.text or "catalogue" in refused.text
    assert int(refused.headers["retry-after"]) > 0
    until = time.monotonic() + 30
    while fleet.client.register("Eve", make_clip(1.5)).status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.5)
    assert fleet.client.speak(voice="Ada").audio == before


def test_a_server_that_was_frozen_speaks_nothing_deleted_meanwhile(fleet, make_clip):
    one, other = fleet.direct
    one.register("Fay", make_clip(2.0), ref_text=SPOKEN).raise_for_status()
    before = other.speak(voice="Ada").audio
    assert other.speak(voice="Fay").status == 200
    group = fleet.servers[1].pid  # which it leads
    os.killpg(group, signal.SIGSTOP)
    try:
        until = time.monotonic() + 60
        assert one.speak(voice="Ada").audio == before
        while (answer := one.http.delete("/v1/audio/voices/Fay")).status_code == 503:
            assert time.monotonic() < until, answer.text
        assert answer.status_code == 200
        assert one.speak(voice="Fay").status == 400
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        os.killpg(group, signal.SIGCONT)
    assert other.speak(voice="Fay").status == 400
    assert other.speak(voice="Ada").audio == before


def test_without_one_of_the_servers_the_other_speaks_and_deletes(fleet):
    one, other = fleet.servers
    other.kill()
    spoken = [fleet.client.speak(voice="Ada") for _ in range(6)]
    assert {s.status for s in spoken} == {200}
    # The dead one's lease runs out before the answer is given up.
    assert fleet.client.http.delete("/v1/audio/voices/Ada").status_code == 200
    assert fleet.client.speak(voice="Ada").status == 400
    assert one.is_healthy()
