"""What is lost or replaced while a request is made or in the engine: never heard."""

import asyncio

import pytest
from vllm.v1.engine.exceptions import EngineGenerateError

from tests.in_process_workers import SpectrumEncoder, clip, new_speaker, store_clip
from tests.speaking import (
    as_raw_stream,
    data_url,
    each_way,
    lose_files,
    plainly,
    refusal,
    registered,
    wav,
)
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.records import NewSpeaker
from vllm_tts_cache.entrypoints.serving.serving import MAX_SUBMITS
from vllm_tts_cache.entrypoints.speakers import pending
from vllm_tts_cache.entrypoints.speakers.ensure import MAX_TRIES
from vllm_tts_cache.errors import GoneError
from vllm_tts_cache.speaker.reference import FIELD, encoders_id

BUSY_REPLACING = "Voice 'Ann' is being replaced"
BY_VECTOR = {"x_vector_only_mode": True}


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Workers are asked often: what is lost is made anew, many times over here."""
    monkeypatch.setattr(pending, "ASK_SECONDS", 0.02)
    monkeypatch.setattr(pending, "MIN_ASK_SECONDS", 0.01)
    monkeypatch.setattr(pending, "RENEW_SECONDS", 0.02)


def losing(server, sha):
    return lambda: lose_files(server, sha)


def deleting(server, sha):
    """Delete the voice, with what the engine would find of it."""

    def delete():
        store = server.service.store
        store.remove_files(store.registrations.delete("Ann"))
        lose_files(server, sha)

    return delete


def replacing(server, sha):
    """Give the voice another clip each time; the files of the one before go."""
    store, shas = server.service.store, [sha]

    def replace():
        lose_files(server, shas[-1])
        shas.append(store_clip(store, clip(len(shas)), name="Ann").audio_sha256)
        store.files.discard(shas[-2], 0)

    return replace, shas


def cloning(server, monkeypatch, clone):
    """Have the adapter make prompts by this function; returns its own one."""
    adapter = type(server.handler._get_tts_adapter())
    own = adapter.clone
    monkeypatch.setattr(adapter, "clone", clone)
    return own


def embedding(server, value):
    """Register one in the place of the voice; returns its length."""
    values = (value,) * server.embedding_dim
    raw = NewSpeaker(name="Ann", consent="y", embedding=values)
    server.service.store.registrations.register(raw, None)
    return len(values)


# -------- in the engine


@pytest.mark.parametrize("num_times", [1, 2])
async def test_a_prompt_that_the_engine_misses_is_made_once_more(server, num_times):
    async for speak, sha in each_way(server):
        before = server.encodes
        server.engine.before_prefill = [losing(server, sha)] * num_times
        assert await refusal(speak, server, voice="Ann") is None
        assert len(server.engine.prompts) == 1 + num_times
        assert server.encodes == {name: n + num_times for name, n in before.items()}


async def test_a_prompt_that_is_always_missing_is_an_error_that_says_why(server):
    async for speak, sha in each_way(server):
        server.engine.before_prefill = [losing(server, sha)] * MAX_SUBMITS
        status, told = await refusal(speak, server, voice="Ann")
        assert status in (0, 500)
        # As it happens: lost after it was published, or before.
        assert "is not stored" in told or "neither in memory nor on the disk" in told
        assert len(server.engine.prompts) <= MAX_SUBMITS
        server.engine.before_prefill = []
        assert await refusal(speak, server, voice="Ann") is None


async def test_a_voice_that_was_replaced_meanwhile_speaks_as_the_new_one(server):
    async for speak, sha in each_way(server):
        replace, shas = replacing(server, sha)
        server.engine.before_prefill = [replace]
        assert await refusal(speak, server, voice="Ann", **BY_VECTOR) is None
        told = [p["additional_information"][FIELD][0] for p in server.engine.prompts]
        assert told == shas


async def test_a_voice_that_is_replaced_at_each_submit_is_to_be_asked_for_later(server):
    """It was a 500, as if the server had failed."""
    async for speak, sha in each_way(server):
        replace, _ = replacing(server, sha)
        server.engine.before_prefill = [replace] * MAX_SUBMITS
        status, told = await refusal(speak, server, voice="Ann", **BY_VECTOR)
        assert status in (0, 503) and BUSY_REPLACING in told
        assert len(server.engine.prompts) == MAX_SUBMITS
        assert await refusal(speak, server, voice="Ann", **BY_VECTOR) is None


@pytest.mark.parametrize("num_lost", [0, MAX_SUBMITS - 1])
async def test_one_that_is_deleted_before_its_last_submit_is_unknown(server, num_lost):
    async for speak, sha in each_way(server):
        lost = [losing(server, sha)] * num_lost
        server.engine.before_prefill = [*lost, deleting(server, sha)]
        status, told = await refusal(speak, server, voice="Ann")
        assert status in (0, 400) and "'Ann' is not registered" in told


async def test_an_inline_clip_that_goes_with_a_voice_is_stored_again(server):
    """The retry stored it again, and then failed anyway."""
    async for speak, sha in each_way(server):
        server.engine.before_prefill = [deleting(server, sha)]
        assert await refusal(speak, server, ref_audio=data_url(), **BY_VECTOR) is None
        assert len(server.engine.prompts) == 2
        assert server.service.store.has_audio(sha)


async def test_a_failure_that_is_not_ours_stays_the_hosts(server):
    await registered(server)

    def fail():
        raise EngineGenerateError("out of something")

    server.engine.before_prefill = [fail]
    assert (await plainly(server, voice="Ann")).status_code == 500
    assert len(server.engine.prompts) == 1


async def test_a_stream_that_fails_before_its_first_audio_is_counted_as_over(server):
    server.app.state.enable_server_load_tracking = True
    server.app.state.server_load_metrics = 0
    sha = await registered(server)
    for _ in range(2):
        server.engine.before_prefill = [losing(server, sha)] * MAX_SUBMITS
        assert (await as_raw_stream(server, voice="Ann")).status_code == 500
        server.engine.before_prefill = []
        assert (await as_raw_stream(server, voice="Ann")).status_code == 200
    assert server.app.state.server_load_metrics == 0


# -------- while its prompt is made


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_what_goes_meanwhile_is_resolved_anew(server, monkeypatch, is_deleted):
    """Where the codes are read for prompts it was a 500."""
    fails = []

    async def cloned(self, speaker):
        if not fails:
            return await clone(self, speaker)
        if is_deleted:
            store = server.service.store
            store.remove_files(store.registrations.delete("Ann"))
        raise fails.pop()

    clone = cloning(server, monkeypatch, cloned)
    async for speak, _ in each_way(server):
        fails.append(GoneError("it is gone"))
        told = await refusal(speak, server, voice="Ann")
        assert (told is not None) is is_deleted
        if told is not None:
            assert told[0] in (0, 400) and "not registered" in told[1]


@pytest.mark.parametrize("num_times", [MAX_TRIES - 1, MAX_TRIES])
async def test_one_replaced_meanwhile_speaks_or_is_busy(server, monkeypatch, num_times):
    """With the second time it was a 500."""
    spoken = []

    async def cloned(self, speaker):
        spoken.append(speaker.clip.ref.audio_sha256)
        if len(spoken) > num_times:
            return await clone(self, speaker)
        for number in 9, len(spoken) // 2:  # the last comes back, as another
            store_clip(server.service.store, clip(number), name="Ann")
        raise GoneError("it is gone")

    clone = cloning(server, monkeypatch, cloned)
    async for speak, _ in each_way(server):
        spoken.clear()
        told = await refusal(speak, server, voice="Ann", **BY_VECTOR)
        assert len(set(spoken)) == MAX_TRIES
        assert (told is None) is (num_times < MAX_TRIES)
        if told is not None:
            assert told[0] in (0, 503) and BUSY_REPLACING in told[1]


async def test_what_goes_of_a_voice_that_stays_is_our_failure(server, monkeypatch):
    await registered(server)

    async def cloned(self, speaker):
        raise GoneError("it is gone")

    cloning(server, monkeypatch, cloned)
    assert (await plainly(server, voice="Ann")).status_code == 500


@pytest.mark.parametrize("num_times", [MAX_TRIES - 1, MAX_TRIES])
async def test_a_precompute_follows_what_is_replaced(server, monkeypatch, num_times):
    """With the second time it was a 500."""
    await registered(server)
    ensurer = server.service.encodings
    ensure, asked = ensurer.ensure, []

    async def ensured(need, **how):
        asked.append(need.ref.audio_sha256)
        if len(asked) <= num_times:
            for number in 9, len(asked) // 2:  # the last comes back, as another
                store_clip(server.service.store, clip(number), name="Ann")
            raise GoneError("it is gone")
        return await ensure(need, **how)

    monkeypatch.setattr(ensurer, "ensure", ensured)
    answer = await server.client.post("/v1/audio/voices/Ann/cache")
    assert len(set(asked)) == MAX_TRIES
    if num_times < MAX_TRIES:
        assert answer.json()["cache_status"] == "ready", answer.text
        return
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["Retry-After"]) > 0
    assert BUSY_REPLACING in answer.json()["error"]["message"]


async def test_an_embedding_that_is_replaced_while_read_speaks(server, monkeypatch):
    """It was a 400: not registered."""
    embedding(server, 0.125)
    store = server.service.store
    look = store.speaker_embedding

    def late(record):
        if record.generation == 1:
            embedding(server, 0.25)
        return look(record)

    monkeypatch.setattr(store, "speaker_embedding", late)
    answer = await plainly(server, voice="Ann")
    assert answer.status_code == 200, answer.text
    (prompt,) = server.engine.prompts
    spoken = prompt["additional_information"]["voice_clone_prompt"][0]
    assert set(spoken["ref_spk_embedding"]) == {0.25}


async def test_a_voice_that_an_embedding_replaces_meanwhile_speaks(server, monkeypatch):
    """It was a 400 that told a client to try again."""
    await registered(server)
    dims = []

    async def cloned(self, speaker):
        dims.append(embedding(server, 0.125))
        raise GoneError("it is gone")

    cloning(server, monkeypatch, cloned)
    answer = await plainly(server, voice="Ann")
    assert answer.status_code == 200, answer.text
    (prompt,) = server.engine.prompts
    info = prompt["additional_information"]
    assert FIELD not in info
    assert len(info["voice_clone_prompt"][0]["ref_spk_embedding"]) == dims[0]


async def test_an_inline_clip_that_is_deleted_while_it_waits_is_stored_again(server):
    server.encoders[0].gate.clear()

    def speaking(**of_clip):
        asked = plainly(server, ref_audio=data_url(**of_clip), **BY_VECTOR)
        return asyncio.create_task(asked)

    blocker = speaking(pitch_hz=500)
    await asyncio.to_thread(server.encoders[0].entered.wait, 20)
    decoded, store = decode(wav()), server.service.store
    waiting = speaking()
    while not store.has_audio(decoded.audio.audio_sha256):
        await asyncio.sleep(0.01)
    store.registrations.register(new_speaker("Ann", decoded.audio), decoded)
    store.remove_files(store.registrations.delete("Ann"))
    server.encoders[0].gate.set()
    assert (await waiting).status_code == (await blocker).status_code == 200
    assert store.has_audio(decoded.audio.audio_sha256)


async def test_a_prompt_by_the_encoders_of_before_is_made_anew_by_those_of_now(server):
    """Those of both are stored: ids of the ones met rows of the others."""
    await registered(server)
    before = {each.name: each for each in server.encoders}
    after = {name: SpectrumEncoder(name) for name in before}
    for each in after.values():
        each.fingerprint = each.fingerprint[::-1]
    known = server.service.encodings
    for encoders in (after, before):
        server.speakers.fingerprints = server.speakers.load_encoders(encoders.copy)
        assert (await server.speak(voice="Ann")).status_code == 200
        now = encoders_id(server.speakers.fingerprints)
        told = [p["additional_information"][FIELD][2] for p in server.engine.prompts]
        assert told[-1] == now == known.encoders_id
        assert await known.fingerprints() == server.speakers.fingerprints


async def test_a_worker_without_the_secret_of_now_gets_it_with_the_next_try(server):
    """A talker that was started anew, and another secret: no request fails of it."""
    await registered(server)
    known, database = server.service.encodings, server.service.store.database
    first = database.secret()
    assert (await server.speak(voice="Ann")).status_code == 200
    assert known.secret == first
    with database.write() as db:
        db.execute(schema.secret.delete())
    assert (await server.speak(voice="Ann")).status_code == 200  # as it is remembered
    server.speakers._secrets.clear()
    assert (await server.speak(voice="Ann")).status_code == 200
    assert first != known.secret == database.secret()
    assert [*server.speakers._secrets] == [known.secret]
