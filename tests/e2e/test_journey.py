"""A family's voices through two servers: spoken, evicted, damaged, killed, restarted.

The tests of one family follow one another, on two starts of the engine; the default
family's begin with stock's server on the same directory in the long proofs.
"""

import re
import threading
import time

import httpx
import pytest

from tests import crowds
from vllm_tts_cache.speaker.family import possible_modes
from vllm_tts_cache.testing.server import SpeechClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.every_family]

TEXT = "Hello world, this is a test."
SPOKEN = "Hello there."
SLOW = "Hello world. " * 8
# Room in memory for one encoding; no KV prefix, or a voice's second request would
# need no encoding.
FIRST = {"stage_0": {"enable_prefix_caching": False}, "SPEAKER_CACHE_MAX_ENTRIES": 1}
ROUNDS = 8


class Told:
    """What the first server said, for the second one to say again."""

    def __init__(self, servers, options):
        self.servers = servers
        self.restart(options)
        self.heard = []
        self.crowd = {}

    def restart(self, options):
        self.server, self.client = self.servers.start(**options)


# In `make test` nothing of stock is changed by loading (test_plugin_loading.py), and
# its directory is imported (tests/unit/catalogue/test_stock_import.py).
@pytest.mark.long
@pytest.mark.does("raw_embeddings")
def test_switched_off_is_stock_and_agrees_on_an_embedding(journey, client, make_clip):
    values = [0.02 * (i % 5 - 2) for i in range(128)]
    request = {"speaker_embedding": values, "task_type": "Base"}
    _, stock = journey.start(SPEAKER_CACHE_ENABLED=0)
    modes = [{"non_streaming_mode": is_on, **request} for is_on in (False, True)]
    ours = [client.speak("Hello there.", **mode) for mode in modes]
    theirs = [stock.speak("Hello there.", **mode) for mode in modes]
    assert [s.status for s in (*ours, *theirs)] == [200] * 4
    assert [s.audio for s in ours] == [s.audio for s in theirs]
    assert theirs[0].cache is None
    assert stock.http.get("/v1/audio/speaker_cache").status_code == 404
    stock.register("stock voice", make_clip(), ref_text="Hello there.")
    assert stock.speak(voice="stock voice").status == 200
    assert not (journey.samples_dir / "catalogue.sqlite3").exists()


@pytest.fixture(scope="module")
def told(journey):
    return Told(journey, FIRST)


@pytest.mark.long
@pytest.mark.does("raw_embeddings")
def test_a_voice_of_stocks_is_imported_and_deleted_where_stock_kept_it(told):
    client, samples_dir = told.client, told.servers.samples_dir
    shown = client.http.get("/v1/audio/voices/stock voice").json()
    assert shown["voice"]["ref_text"] == "Hello there."
    assert client.speak(voice="stock voice").status == 200
    assert list(samples_dir.glob("*.safetensors"))
    assert client.http.delete("/v1/audio/voices/stock voice").status_code == 200
    assert list(samples_dir.glob("*.safetensors")) == []
    assert told.servers.problems() == []


@pytest.mark.other_host
def test_a_voice_speaks(told, family, make_clip):
    told.client.register("Ada", make_clip(3.3), ref_text=SPOKEN)
    told.client.precompute("Ada").raise_for_status()
    told.heard = speak_as_ada(told.client, family)


def speak_as_ada(client, family):
    """In each way that a stored voice of the family speaks by default."""
    ways = [{}, {"x_vector_only_mode": True}] if family.embedding_mode else [{}]
    spoken = [client.speak(TEXT, voice="Ada", **way) for way in ways]
    assert {(s.status, s.cache) for s in spoken} == {(200, "hit")}
    heard = [s.audio for s in spoken]
    assert len(set(heard)) == len(heard)
    return heard


@pytest.mark.does("keeps_decoder_states")
def test_a_precomputed_voice_is_in_the_decoder_before_its_first_text(told, make_clip):
    client, before = told.client, decoder_counts(told.client)
    make_ready(client, "early", make_clip(4.0))
    at_rest = decoder_counts(client)
    assert grown(before, at_rest) == {"made": 1, "hits": 0, "states": 1}
    assert client.speak("Hi.", voice="early").cache == "hit"
    first = decoder_counts(client)
    assert grown(at_rest, first) == {"made": 0, "hits": 1, "states": 0}
    client.register("late", make_clip(4.0), ref_text=SPOKEN).raise_for_status()
    assert client.speak("Hi.", voice="late").cache == "miss"
    second = decoder_counts(client)
    assert grown(first, second) == {"made": 1, "hits": 0, "states": 1}
    assert client.speak("Hi.", voice="late").cache == "hit"
    last = decoder_counts(client)
    assert grown(second, last) == {"made": 0, "hits": 1, "states": 0}
    until = time.monotonic() + 60.0
    while decoder_metrics(client) != {"made": last["made"], "hit": last["hits"]}:
        assert time.monotonic() < until
        time.sleep(0.5)
    make_ready(client, "never", make_clip(4.0))  # it is deleted before it spoke
    assert decoder_counts(client)["bytes"] > last["bytes"]
    for name in ("early", "late", "never"):
        client.http.delete(f"/v1/audio/voices/{name}").raise_for_status()
    gone = decoder_counts(client)
    assert (gone["states"], gone["bytes"]) == (before["states"], before["bytes"])


def make_ready(client, name, clip):
    """Precompute a voice, and wait until what depends on it alone is computed too."""

    def warming():
        return client.stats()["kv_warming"]

    before = warming()["warmed"]
    client.register(name, clip, ref_text=SPOKEN).raise_for_status()
    client.precompute(name).raise_for_status()
    until = time.monotonic() + 60.0
    # Others may be before it: after a start those that spoke last.
    while (shown := warming())["waiting"] or shown["warmed"] == before:
        assert time.monotonic() < until
        time.sleep(0.1)


def decoder_counts(client):
    (stats,) = client.stats()["decoders"]
    return stats


def grown(before, after):
    return {name: after[name] - before[name] for name in ("made", "hits", "states")}


def decoder_metrics(client):
    pattern = r'decoder_states_total\{outcome="(\w+)"\} (\S+)'
    found = re.findall(pattern, client.http.get("/metrics").text)
    return {outcome: float(number) for outcome, number in found}


def test_evicted_corrupted_and_deleted_encodings(told, family, make_clip):
    server, client, samples_dir = told.server, told.client, told.servers.samples_dir
    # Of the cheapest mode: without a transcript where the family has such a one.
    is_needed = not possible_modes(family, has_transcript=False)
    fields = {"ref_text": SPOKEN} if is_needed else {}
    encoder = family.encoders[0]
    heard = {}
    for name in ("A", "B"):
        client.register(name, make_clip(), **fields)
        client.precompute(name)
        heard[name] = client.speak("Hi.", voice=name).audio
    assert heard["A"] != heard["B"]
    sha = client.http.get("/v1/audio/voices/A").json()["voice"]["audio_sha256"]
    num_encodes = client.encodes()[encoder]

    def speak_both():
        for name in ("A", "B"):
            spoken = client.speak("Hi.", voice=name)
            assert (spoken.status, spoken.audio) == (200, heard[name])

    speak_both()  # evicted from memory, reloaded from disk
    assert client.encodes()[encoder] == num_encodes

    for file in encoding_files(samples_dir, sha):
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    speak_both()  # found damaged, encoded again, and the request submitted once more
    assert client.encodes()[encoder] == num_encodes + 1

    for file in encoding_files(samples_dir, sha):
        file.unlink()
    speak_both()
    assert client.encodes()[encoder] == num_encodes + 2

    # Corrupt, evicted, and its audio gone: this voice cannot be had any more.
    beside, done = [], threading.Event()
    stream = threading.Thread(target=keep_speaking, args=(server.url, beside, done))
    alone = client.speak(SLOW, voice="B")
    for file in encoding_files(samples_dir, sha):
        file.write_bytes(b"garbage")
        file.with_name("audio.safetensors").unlink(missing_ok=True)
    stream.start()
    time.sleep(0.5)
    body = {"model": "tts", "input": "Hi.", "voice": "A"}
    lost = client.http.post("/v1/audio/speech", json=body)
    assert lost.status_code == 500
    assert "reference audio" in lost.json()["error"]["message"]
    again = client.speak("Hi.", voice="A")
    assert again.status == 500 and b"Traceback" not in again.audio
    done.set()
    stream.join()
    assert {(s.status, s.audio) for s in beside} == {(200, alone.audio)}
    assert client.speak("Hi.", voice="B").audio == heard["B"]
    assert server.is_healthy()
    assert client.http.delete("/v1/audio/voices/A").status_code == 200


def encoding_files(samples_dir, sha):
    """One for each encoder of the mode that it was spoken in."""
    found = (samples_dir / "store" / sha[:2] / sha).glob("*.safetensors")
    files = [path for path in found if path.stem != "audio"]
    assert files
    return files


def keep_speaking(url, spoken, done):
    client = SpeechClient(url)
    while not done.is_set():
        spoken.append(client.speak(SLOW, voice="B"))
    client.close()


@pytest.mark.does("waits_for_kv")
def test_voices_are_heard_without_a_cache_and_alone(told, make_clip):
    for number in range(4):
        name = f"voice {number}"
        told.client.register(name, make_clip(20.0), ref_text=SPOKEN)
        told.client.precompute(name).raise_for_status()
        for text in crowds.CROWD_TEXTS:
            told.crowd[name, text] = crowds.speak_briefly(told.client, name, text)
    assert len(set(told.crowd.values())) == len(told.crowd)


def test_kill_in_the_middle_of_uploads_and_of_a_precompute(told, case, make_clip):
    def upload_and_precompute(number):
        own, attempt = SpeechClient(told.server.url), 0
        while True:
            attempt += 1
            try:
                name = f"victim-{number}-{attempt}"
                own.register(name, make_clip(8.0), ref_text="x", precompute="true")
            except httpx.HTTPError:
                own.close()
                return

    num_before = told.client.stats()["registry"]["speakers"]
    target = upload_and_precompute
    uploads = [threading.Thread(target=target, args=(n,)) for n in range(2)]
    for upload in uploads:
        upload.start()
    until = time.monotonic() + 60.0
    while told.client.stats()["registry"]["speakers"] < num_before + 3:
        assert time.monotonic() < until
        time.sleep(0.1)
    told.server.kill()
    for upload in uploads:
        upload.join()
    # Another one in what must not be heard: more API processes, say, or prefills in
    # chunks, in a pool too small for all voices.
    told.restart({"stage_0": case.short_of_kv, **case.second_server})
    assert told.servers.problems() == []


def test_after_the_restart_nothing_known_is_encoded_again(told, family):
    # What a kill kept from being encoded is encoded now; what was known is not.
    client = told.client
    assert client.speak(TEXT, voice="Ada").cache == "hit"
    assert speak_as_ada(client, family) == told.heard
    workers = client.stats()["workers"]
    assert sum(w["failed_prompts"] for w in workers) == 0


@pytest.mark.does("keeps_decoder_states")
def test_without_decoder_states_a_clone_in_context_sounds_the_same(told, case):
    """To the bit: the tiny decoder in bfloat16 has no other sums."""
    assert case.second_server["SPEAKER_CACHE_DECODER_MAX_BYTES"] == 0
    client = told.client
    assert "decoders" not in client.stats()
    assert "decoder_states_total{" not in client.http.get("/metrics").text
    for _ in range(2):  # as the host's first chunk and its later ones
        spoken = client.speak(TEXT, voice="Ada")
        assert (spoken.cache, spoken.audio) == ("hit", told.heard[0])


@pytest.mark.does("waits_for_kv")
def test_audio_depends_on_no_cache_no_chunk_and_no_neighbour(told, case):
    """With what the family caches, in chunks, in a pool too small for all voices."""
    server, client, plain = told.server, told.client, told.crowd
    for _ in range(2):
        assert {r: crowds.speak_briefly(client, *r) for r in plain} == plain
    hits = crowds.kv_counter(client, "prefix_cache_hits")
    assert (hits > 0) is case.family.shares_kv
    crowds.crowd(server, plain)
    assert case.family.resumes or crowds.kv_counter(client, "num_preemptions") == 0
    assert {r: crowds.speak_briefly(client, *r) for r in plain} == plain


def test_voices_of_the_killed_server_speak(told):
    shown = told.client.http.get("/v1/audio/voices").json()["uploaded_voices"]
    victims = [v["name"] for v in shown if v["name"].startswith("victim")]
    assert victims, "the kill came before the first upload was done"
    # Each of them, so that no test after this one counts an encode of theirs.
    assert {told.client.precompute(name).status_code for name in victims} == {200}
    for name in victims[-2:]:
        assert told.client.speak("Hi.", voice=name).status == 200


@pytest.mark.does("shares_kv")
def test_a_precomputed_voice_is_in_the_kv_before_its_first_text(told, make_clip):
    client = told.client
    make_ready(client, "early", make_clip(10.0))
    speak = lambda: client.speak(TEXT, voice="early")  # noqa: E731
    spoken, had, found = crowds.prefix_tokens(client, speak)
    assert found / had >= 0.7
    assert spoken.cache == "hit"


@pytest.mark.does("two_api_processes")
def test_uploads_and_deletes_are_seen_by_both_api_processes(told, family, make_clip):
    client = told.client
    before = client.encodes()

    def speak():
        # A new connection each time, so that the kernel picks either process.
        client.http.headers["Connection"] = "close"
        return client.speak("Hi.", voice="both")

    heard = []
    for clip in (make_clip(pitch_hz=300), make_clip(pitch_hz=900)):
        assert client.register("both", clip, ref_text="Hello.").status_code == 200
        spoken = [speak() for _ in range(ROUNDS)]
        assert {s.status for s in spoken} == {200}
        assert len({s.audio for s in spoken}) == 1
        heard.append(spoken[0].audio)
    assert heard[0] != heard[1]
    after = client.encodes()
    made = {name: after[name] - before[name] for name in after}
    assert made == dict.fromkeys(family.encoders, 2)
    assert client.http.delete("/v1/audio/voices/both").status_code == 200
    assert {speak().status for _ in range(ROUNDS)} == {400}


def test_nothing_is_lost_and_nothing_is_left(told):
    shown = told.client.http.get("/v1/audio/voices").json()["uploaded_voices"]
    for voice in shown:
        told.client.http.delete(f"/v1/audio/voices/{voice['name']}").raise_for_status()
    assert told.servers.problems() == []
    left = {p.stem for p in told.servers.samples_dir.rglob("*.safetensors")}
    assert left.isdisjoint(voice["audio_sha256"] for voice in shown)
