"""The voices routes over the host's real application."""

import asyncio
import sqlite3
import threading

import httpx
import pytest

from tests.speaking import data_url, wav
from tests.speech_server import listening
from tests.store_samples import fill
from tests.waiting import SOON_SECONDS, soon
from vllm_tts_cache.catalogue import pages
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.entrypoints.speakers import deletions, ensure, pending

VOICES = "/v1/audio/voices"


async def test_a_request_is_done_once_by_its_idempotency_key(server):
    async def sent(key, name="Ann", method="POST"):
        server.client.headers["Idempotency-Key"] = key
        if method == "POST":
            return await server.register(name, wav())
        return await server.client.request(method, f"{VOICES}/{name}")

    first, again = await sent("key"), await sent("key")
    assert first.status_code == 200 and again.json() == first.json()
    refused = [
        await sent("key", "Bob"),
        await sent("key", method="DELETE"),
        await sent(""),
        await sent("a key"),
        await sent(201 * "k"),
        await server.embed("Vec"),
    ]
    for each in refused:
        assert each.status_code == 400
        assert "Idempotency-Key" in each.json()["error"]["message"], each.text
    # One of 200 visible characters is a key.
    gone = [await sent(200 * "~", method="DELETE") for _ in range(2)]
    assert [each.status_code for each in gone] == [200, 200]
    assert gone[0].json() == gone[1].json()
    too_late = await sent("key")
    assert too_late.status_code == 409
    assert "another key" in too_late.json()["error"]["message"]
    assert (await sent("third", method="DELETE")).status_code == 404
    assert (await sent("fourth")).status_code == 200
    # The key of an earlier deletion deletes no voice of that name.
    assert (await sent(200 * "~", method="DELETE")).status_code == 200
    assert server.service.store.names(Page(limit=9)) == ["Ann"]
    server.client.headers["Idempotency-Key"] = "fifth"
    vec = [(await server.embed("Vec")).json() for _ in range(2)]
    assert vec[0]["success"] is True and vec[0] == vec[1]
    assert server.service.store.verify() == []


LONGEST = {"name": 128, "consent": 512, "ref_text": 2000, "speaker_description": 2000}
WRONG = [("consent", " "), ("name", "default"), ("name", "adm\u200bin")]
WRONG += [(field, "é" * (max_chars + 1)) for field, max_chars in LONGEST.items()]


async def test_a_field_that_cannot_be_is_a_400_that_names_it(server):
    """One list of voices with 3 MB each was 600 MB."""
    for field, value in WRONG:
        for answer in await in_both_ways(server, field, value):
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert f"Invalid {field}" in message
            if len(value) > 100:
                most = f"{LONGEST[field]} are allowed"
                assert f"{len(value)} characters" in message and most in message
    assert (await server.client.get(VOICES)).json()["uploaded_voices"] == []
    for field, max_chars in LONGEST.items():
        for answer in await in_both_ways(server, field, "é" * max_chars):
            assert answer.json()["voice"][field] == "é" * max_chars


async def test_an_embedding_that_cannot_be_is_a_400(server):
    for values in ("[]", "[1, 2]", "{", '["a"]', "[1e999]", "null", "[NaN]"):
        answer = await server.embed("bad", speaker_embedding=values)
        assert answer.status_code == 400, values
    assert (await server.client.get(VOICES)).json()["uploaded_voices"] == []


async def in_both_ways(server, field, value):
    """The answers to a clip and to an embedding with this field."""
    fields = {"name": "Ann", field: value}
    with_clip = await server.client.post(
        VOICES,
        data={"consent": "yes", "precompute": "false", **fields},
        files={"audio_sample": ("clip.wav", wav(), "audio/wav")},
    )
    return with_clip, await server.embed(fields.pop("name"), **fields)


async def test_a_field_that_is_not_known_is_left_out_and_said(server):
    """A misspelt ``ref_text`` was dropped in silence, and the voice had none."""
    for answer in await in_both_ways(server, "ref_txt", "Said."):
        (warning,) = answer.json()["warnings"]
        assert warning["code"] == "unknown_field" and "'ref_txt'" in warning["message"]


CLIP_MAX_BYTES = 10 * 1024**2


async def test_a_clip_is_as_large_as_its_limit_or_refused(server):
    largest = await server.register("Ann", padded(wav(), CLIP_MAX_BYTES))
    assert largest.status_code == 200, largest.text
    assert largest.json()["voice"]["file_size"] == CLIP_MAX_BYTES
    answer = await server.register("Ann", padded(wav(), CLIP_MAX_BYTES + 1))
    assert answer.status_code == 400  # of a form that fits
    assert "allowed are 10 MiB" in answer.json()["error"]["message"]
    answer = await server.register("Ann", bytes(12 * 1024**2))
    assert answer.status_code == 413


def padded(data, num_bytes):
    """A WAV of so many bytes, which is heard as it was."""
    size = num_bytes - len(data) - 8
    return data + b"JUNK" + size.to_bytes(4, "little") + bytes(size)


async def test_a_page_is_bounded_in_bytes_and_goes_on(server, monkeypatch):
    monkeypatch.setattr(pages, "PAGE_MAX_BYTES", 20_000)
    names = [f"voice {number:02}" for number in range(12)]
    for name in names:
        done = await server.embed(name, ref_text="é" * 2000, consent="c" * 500)
        assert done.status_code == 200, done.text
    found, query, num_pages = [], {}, 0
    while query is not None:
        answer = await server.client.get(VOICES, params=query)
        assert len(answer.content) < 40_000
        page = answer.json()
        found += [voice["name"] for voice in page["uploaded_voices"]]
        query = {"after": page["next"]} if "next" in page else None
        num_pages += 1
    assert found == names
    assert num_pages > 2
    listed = (await server.client.get(VOICES, params={"names_only": True})).json()
    assert "uploaded_voices" not in listed
    assert set(names) == set(listed["voices"])


async def test_a_page_holds_a_thousand_voices_and_no_more_can_be_asked_for(server):
    for limit in (0, 1001, 10**9):
        answer = await server.client.get(f"{VOICES}?limit={limit}")
        assert 400 <= answer.status_code < 500
    fill(server.service.store, 1001)
    for query in ({}, {"limit": 1000}):
        page = (await server.client.get(VOICES, params=query)).json()
        assert len(page["uploaded_voices"]) == 1000
        assert page["next"] == page["uploaded_voices"][-1]["name"]
        names = {"names_only": True, **query}
        page = (await server.client.get(VOICES, params=names)).json()
        assert len(page["voices"]) == 1000
    rest = (await server.client.get(VOICES, params={"after": page["next"]})).json()
    assert len(rest["uploaded_voices"]) == 1
    assert "next" not in rest


NUM_AT_ONCE = 2
WAITING = {"upload": 32, "list": 64, "delete": 64}


@pytest.mark.parametrize(("kind", "max_waiting"), WAITING.items())
async def test_what_waits_is_bounded_for_each_kind_of_work_and_holds_no_speech_up(
    server, monkeypatch, kind, max_waiting
):
    await server.register("Ann", wav(), ref_text="words")
    service, gate, begun = server.service, threading.Event(), []
    owner, name, ask = {
        "upload": (
            service.uploads,
            "_register_clips",
            lambda: server.register("A", wav()),
        ),
        "list": (service.store, "records", lambda: server.client.get(VOICES)),
        "delete": (
            service.store.registrations,
            "delete",
            lambda: server.client.delete(f"{VOICES}/A"),
        ),
    }[kind]
    work = getattr(owner, name)

    def held(*args, **kwargs):
        begun.append(name)
        assert gate.wait(3 * SOON_SECONDS)
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, held)
    num_served, num_refused = NUM_AT_ONCE + max_waiting, 5
    asked = [asyncio.create_task(ask()) for _ in range(num_served + num_refused)]
    try:
        await soon(lambda: len(begun) >= NUM_AT_ONCE, SOON_SECONDS)
        num_done = lambda: sum(task.done() for task in asked)  # noqa: E731
        await soon(lambda: num_done() >= num_refused, SOON_SECONDS)
        inline = {"ref_audio": data_url(), "x_vector_only_mode": True}
        for fields in ({"voice": "Ann"}, inline):
            answer = await asyncio.wait_for(server.speak(**fields), SOON_SECONDS)
            assert answer.status_code == 200, answer.text
        if kind == "upload":  # changes decode no clip, and go on as well
            tall = server.client.patch(f"{VOICES}/Ann", json={"language": "de"})
            assert (await asyncio.wait_for(tall, SOON_SECONDS)).status_code == 200
        assert len(begun) == NUM_AT_ONCE
        refused = [task.result() for task in asked if task.done()]
        assert len(refused) == num_refused
        assert {answer.status_code for answer in refused} == {503}
        assert all(int(answer.headers["Retry-After"]) > 0 for answer in refused)
    finally:
        gate.set()
    answers = await asyncio.gather(*asked)
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(503) == num_refused


async def test_a_deletion_that_is_not_finished_says_how_far_it_is(server, monkeypatch):
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 0.3)
    await server.register("Ann", wav())
    server.encoders[0].gate.clear()
    encoding = asyncio.create_task(server.client.post(f"{VOICES}/Ann/cache"))
    assert await asyncio.to_thread(server.encoders[0].entered.wait, 20)
    for _ in range(2):
        answer = await server.client.delete(f"{VOICES}/Ann")
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json()["deletion"] == {"files_removed": True, "waiting_for": 1}
        assert "Repeat the DELETE" in answer.json()["error"]["message"]
    assert (await server.client.get(f"{VOICES}/Ann")).status_code == 404
    server.encoders[0].gate.set()
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 15.0)
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 200
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 404
    assert (await encoding).status_code == 404
    assert server.service.store.verify() == []


def num_waiting(server):
    return server.speakers.stats().waiting["registered"]


async def test_a_voice_in_its_turn_or_forced_goes_after_one_that_is_urgent(server):
    encoder, seconds = server.encoders[0], []

    def noted(audio, encode=encoder.encode):
        seconds.append(round(audio.seconds))
        return encode(audio)

    encoder.encode = noted
    encoder.gate.clear()
    waiting = []
    asked = ((1, ""), (2, "urgent=false"), (3, "force=true"), (4, ""))
    for length, query in asked:
        await server.register(f"v{length}", wav(seconds=length))
        made = server.client.post(f"{VOICES}/v{length}/cache?{query}")
        waiting.append(asyncio.create_task(made))
        await soon(
            lambda length=length: len(server.service.encodings.pending) == length
        )
        if length == 1:
            assert await asyncio.to_thread(encoder.entered.wait, 20)
        await soon(lambda length=length: num_waiting(server) == length - 1)
    encoder.gate.set()
    done = await asyncio.gather(*waiting)
    assert [answer.json()["cache_status"] for answer in done] == ["ready"] * 4
    assert seconds == [1, 4, 2, 3]


async def test_a_voice_that_is_not_urgent_is_made_after_answering(server, monkeypatch):
    monkeypatch.setattr(ensure, "IN_TURN_SECONDS", 0.05)
    server.encoders[0].gate.clear()
    await server.register("Ann", wav())
    in_turn = f"{VOICES}/Ann/cache?urgent=false"
    asked = await asyncio.gather(*(server.client.post(in_turn) for _ in range(5)))
    assert [answer.status_code for answer in asked] == [202] * 5
    assert asked[0].json() == {"voice": "Ann", "cache_status": "processing"}
    encodings = server.service.encodings
    await soon(lambda: len(encodings._background) == 1)  # however many ask
    server.encoders[0].gate.set()
    await server.settled()
    done = await server.client.post(in_turn)
    assert (done.status_code, done.json()["cache_status"]) == (200, "ready")
    assert "already exists" in done.json()["message"]
    forced = await server.client.post(f"{in_turn}&force=true")
    assert forced.json() == {"voice": "Ann", "cache_status": "ready"} or (
        forced.status_code == 202
    )
    await server.settled()
    assert sum(server.encodes.values()) == 2


async def test_a_voice_that_is_not_urgent_fails_with_its_reason(server):
    server.encoders[0].errors.append(RuntimeError("no kernel"))
    await server.register("Ann", wav())
    in_turn = f"{VOICES}/Ann/cache?urgent=false"
    failed = await server.client.post(in_turn)
    assert (failed.status_code, failed.json()["cache_status"]) == (500, "failed")
    shown = (await server.client.get(f"{VOICES}/Ann")).json()
    assert (shown["attempts"], "next_try_at" in shown) == (1, True)
    assert "no kernel" in failed.json()["error"]["message"] and shown["error"]
    assert (await server.client.post(in_turn)).json()["cache_status"] == "ready"
    unknown = f"{VOICES}/Bob/cache?urgent=false"
    assert (await server.client.post(unknown)).status_code == 404


async def test_what_no_client_waits_for_any_more_is_not_encoded(server, monkeypatch):
    """It was waited for until the end of its time, for nobody."""
    monkeypatch.setattr(pending, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(pending, "RENEW_SECONDS", 0.3)
    server.encoders[0].gate.clear()
    for name, length in (("Ann", 1), ("Bob", 2)):
        await server.register(name, wav(seconds=length))
    async with listening(server.app) as port:
        url = f"http://127.0.0.1:{port}{VOICES}"
        ann = asyncio.create_task(server.client.post(f"{VOICES}/Ann/cache"))
        assert await asyncio.to_thread(server.encoders[0].entered.wait, 20)
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(f"{url}/Bob/cache", timeout=0.5)
        await soon(lambda: len(server.service.encodings.pending) == 1)
        await asyncio.sleep(1.5 * pending.LEASE_SECONDS)  # of what the worker was told
    server.encoders[0].gate.set()
    assert (await ann).status_code == 200
    assert sum(server.encodes.values()) == 1


async def test_a_stopped_writer_stops_uploads_and_no_speech(server):
    """Six uploads that waited for its lock took the threads of all inline speech."""
    await server.register("Ann", wav(), ref_text="words")
    await server.speak(voice="Ann")
    inline = {"ref_audio": data_url(), "x_vector_only_mode": True}
    await server.speak(**inline)
    path = server.service.store.directory / FILE_NAME
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    uploads = [
        asyncio.create_task(server.register(f"v{n}", wav(pitch_hz=200 + n)))
        for n in range(6)
    ]
    await asyncio.sleep(1.0)
    for fields in ({"voice": "Ann"}, inline):
        answer = await asyncio.wait_for(server.speak(**fields), 60)
        assert answer.headers["X-Speaker-Cache"] == "hit", answer.text
    assert not any(upload.done() for upload in uploads)
    other.execute("ROLLBACK")
    done = await asyncio.gather(*uploads)
    assert {answer.status_code for answer in done} == {200}
    other.close()


async def test_the_cache_is_shown_with_one_call_and_no_listing(server, monkeypatch):
    await server.register("Ann", wav(), ref_text="words")
    await server.speak(voice="Ann")
    await server.settled()
    server.engine.calls.clear()
    with monkeypatch.context() as unable:
        for name in ("os.listdir", "os.scandir"):
            unable.setattr(name, None)
        shown = (await server.client.get("/v1/audio/speaker_cache")).json()
    asked = ["tts_cache_stats", "tts_cache_decoder_stats"]  # of a stage each
    assert server.engine.calls == asked
    assert shown["registry"] == {"speakers": 1}
    assert shown["storage"]["registered"]["encodings"]["files"] == 2
    assert shown["workers"][0]["encodes"] == {"speaker": 1, "codec": 1}
