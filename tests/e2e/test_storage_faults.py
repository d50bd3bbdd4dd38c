"""What a server survives: kill -9, full disks, corrupt and missing files."""

import resource
import threading
import time

import httpx
import pytest

from vllm_tts_cache.testing.client import SpeechClient, data_url
from vllm_tts_cache.testing.families import FISH_SPEECH, QWEN3_TTS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def encodings(directory, sha):
    return sorted((directory / "encodings").glob(f"v*/**/{sha}/*.safetensors"))


def test_kill_in_the_middle_of_uploads_and_of_a_precompute(
    make_server, storage, make_clip
):
    server, client = make_server()
    client.register("survivor", make_clip(), ref_text="Hello there.")
    client.precompute("survivor")
    heard = client.speak(voice="survivor")

    def upload_and_precompute(number):
        own, attempt = SpeechClient(server.url), 0
        while True:
            attempt += 1
            try:
                name = f"victim-{number}-{attempt}"
                own.register(name, make_clip(20.0), ref_text="x", precompute="true")
            except httpx.HTTPError:
                return

    uploads = [
        threading.Thread(target=upload_and_precompute, args=(n,)) for n in range(2)
    ]
    for upload in uploads:
        upload.start()
    time.sleep(3.0)
    server.kill()
    for upload in uploads:
        upload.join()

    _, client = make_server()
    until = time.monotonic() + 30  # recovery runs beside serving
    while (problems := storage.verify()) and time.monotonic() < until:
        time.sleep(0.2)
    assert problems == []
    again = client.speak(voice="survivor")
    assert (again.audio, again.cache) == (heard.audio, "hit")
    names = [
        v["name"] for v in client.http.get("/v1/audio/voices").json()["uploaded_voices"]
    ]
    victims = [name for name in names if name.startswith("victim")]
    assert victims, "the kill came before the first upload was done"
    for name in victims[-2:]:
        assert client.precompute(name).status_code == 200
        assert client.speak("Hi.", voice=name).status == 200
    assert storage.verify() == []


@pytest.mark.families(QWEN3_TTS, FISH_SPEECH)
def test_evicted_corrupted_and_deleted_encodings(
    family, make_server, storage, make_clip
):
    # Without a KV prefix, or a voice's second request would need no encoding.
    server, client = make_server(
        SPEAKER_CACHE_MAX_ENTRIES=1, stage_0={"enable_prefix_caching": False}
    )
    # One encoding each: x-vector voices where the family has them.
    x_vector = family.family.clones_from_embeddings
    fields = {} if x_vector else {"ref_text": "Hello there."}
    encoder = family.encoders[0]
    heard = {}
    for name in ("A", "B"):
        client.register(name, make_clip(), **fields)
        client.precompute(name)
        heard[name] = client.speak("Hi.", voice=name).audio
    assert heard["A"] != heard["B"]
    sha = client.http.get("/v1/audio/voices/A").json()["voice"]["audio_sha256"]

    def speak_both():
        for name in ("A", "B"):
            spoken = client.speak("Hi.", voice=name)
            assert (spoken.status, spoken.audio) == (200, heard[name])

    speak_both()  # evicted from memory, reloaded from disk
    assert client.encodes()[encoder] == 2

    (file,) = encodings(server.options.samples_dir, sha)
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    speak_both()  # quarantined and encoded again
    assert client.encodes()[encoder] == 3
    assert list((server.options.samples_dir / "encodings" / "quarantine").rglob("*.*"))

    (file,) = encodings(server.options.samples_dir, sha)
    file.unlink()
    speak_both()
    assert client.encodes()[encoder] == 4

    # Corrupt, evicted, and its audio gone: this voice cannot be had any more. The
    # API takes the file for good, so the request reaches the worker and fails there.
    stream = threading.Thread(target=speak_slowly, args=(server.url, beside := []))
    client.speak("Hi.", voice="B")
    (file,) = encodings(server.options.samples_dir, sha)
    file.write_bytes(b"garbage")
    for audio in (server.options.samples_dir / "audio").rglob(f"{sha}.*"):
        audio.unlink()
    stream.start()
    time.sleep(0.5)
    lost = client.http.post(
        "/v1/audio/speech", json={"model": "tts", "input": "Hi.", "voice": "A"}
    )
    assert lost.status_code == 500
    assert "speaker prompt" in lost.json()["error"]["message"]
    again = client.speak("Hi.", voice="A")
    assert again.status == 500 and b"Traceback" not in again.audio
    stream.join()
    assert beside == [200]
    assert client.speak("Hi.", voice="B").audio == heard["B"]
    assert server.is_healthy()


def speak_slowly(url, statuses):
    client = SpeechClient(url)
    statuses.append(client.speak("Hello world. " * 8, voice="B").status)
    client.close()


def test_a_full_disk_refuses_the_upload_and_nothing_else(
    client, shared_server, make_clip
):
    client.register("present", make_clip(), ref_text="Hello there.")
    heard = client.speak(voice="present")
    before = client.stats()["registry"]
    limits = resource.prlimit(shared_server.pid, resource.RLIMIT_FSIZE)
    # No file may grow past 1 MiB: the kernel refuses the write itself.
    # The stored clip is larger, the uploaded FLAC smaller; the WAV is larger before.
    flac, wav = make_clip(25.0, container="FLAC"), make_clip(25.0)
    assert len(flac) < 1 << 20 < len(wav)
    resource.prlimit(shared_server.pid, resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
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
