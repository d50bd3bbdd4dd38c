"""Clips that sound like a voice that is there, or unlike their consent recording."""

import asyncio

import numpy as np
import pytest
import soundfile

from tests.audio_clips import sndfile_bytes
from tests.cli_runs import run
from tests.features.test_names import add, change
from tests.speaking import wav
from tests.waiting import soon
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue import voice_timbre
from vllm_tts_cache.entrypoints.features import similarity, timbre
from vllm_tts_cache.entrypoints.speakers.registering import Upload
from vllm_tts_cache.errors import ConfigError, InvalidSpeakerError, StorageError
from vllm_tts_cache.tenants import ALONE
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
telling = pytest.mark.environment(SPEAKER_SIMILARITY="tell")
refusing = pytest.mark.environment(SPEAKER_SIMILARITY="refuse")


def part(clip, *, is_first):
    samples, rate_hz = soundfile.read(clip.path, dtype="float32")
    middle = len(samples) // 2
    chosen = samples[:middle] if is_first else samples[middle:]
    return sndfile_bytes(chosen, rate_hz)


def softly(clip):
    """What a clip says, further away and in another room, as a WAV file."""
    samples, rate_hz = soundfile.read(clip.path, dtype="float32")
    noise = np.random.default_rng(0).normal(0, 0.002, samples.size)
    return sndfile_bytes((0.4 * samples + noise).astype(np.float32), rate_hz)


# Of one speaker, and of another one. The second half of SPEECH has a long pause.
KEEPER, SAME = SPEECH.path.read_bytes(), softly(SPEECH)
BAKER = OTHER_SPEECH.path.read_bytes()


def codes(answer):
    assert answer.status_code == 200, answer.text
    return [warning["code"] for warning in answer.json().get("warnings", [])]


async def check(client, audio):
    file = {"audio_sample": ("clip.wav", audio, "audio/wav")}
    answer = (await client.post(f"{VOICES}/check", files=file)).json()
    return {r["code"]: r["message"] for r in answer["reasons"]}


async def consent_by(server, audio):
    form = {"name": "their consent", "language": "en"}
    file = {"recording": ("consent.wav", audio, "audio/wav")}
    done = await server.client.post(CONSENTS, data=form, files=file)
    assert done.status_code == 200, done.text
    return done.json()["id"]


def vectors(store, tenant="default"):
    with store.database.read() as db:
        return dict(voice_timbre.of_tenant(db, tenant, 99))


@pytest.mark.every_backend
def test_how_a_voice_sounds_is_kept_until_the_voice_is_gone(open_here):
    store = open_here()
    ann, bob = (add(store, name, seed=n) for n, name in enumerate(("Ann", "Bob")))

    def keep(record, vector, sha=None):
        with store.database.write() as db:
            sha = sha or record.audio_sha256
            voice_timbre.keep(db, record.generation, sha, vector)

    def unheard(after=0):
        with store.database.read() as db:
            return voice_timbre.next_unheard(db, after)

    assert unheard() == (ann.generation, ann.audio_sha256)
    keep(ann, b"a" * 256)
    keep(ann, b"x" * 256)  # another server has heard it as well
    assert unheard() == (bob.generation, bob.audio_sha256)
    assert unheard(bob.generation) == (bob.generation + 20_000, None)
    keep(bob, b"x" * 256, "another clip's")
    keep(bob, b"b" * 256)
    change(store, "Ann", name="Anna")
    assert vectors(store) == {ann.generation: b"a" * 256, bob.generation: b"b" * 256}
    assert vectors(store, "other") == {}
    again = add(store, "Bob", seed=3)
    keep(again, voice_timbre.NOTHING)
    assert unheard()[1] is None
    store.remove_files(store.registrations.delete("Anna"))
    keep(bob, b"b" * 256)
    assert vectors(store) == {}
    with store.database.read() as db:
        known = voice_timbre.names(db, [ann.generation, again.generation])
    assert known == {again.generation: ("Bob", "bob")}


def test_a_vector_tells_speakers_apart_and_is_the_same_each_time():
    encoder = timbre.TimbreEncoder()
    heard = [encoder.vector(decode(c).audio) for c in (KEEPER, SAME, BAKER)]
    keeper, same, baker = heard
    assert encoder.vector(decode(KEEPER).audio) == keeper
    assert keeper and same and baker
    alike, unlike = timbre.similarities(keeper, [same, baker])
    assert alike > similarity.SAME_FROM > similarity.OTHER_BELOW > unlike
    for nothing in (wav(pitch_hz=120.0), part(SPEECH, is_first=False)):
        assert encoder.vector(decode(nothing).audio) is None


@telling
async def test_what_sounds_alike_is_told(server):
    assert codes(await server.register("Keeper", KEEPER)) == []
    assert codes(await server.register("Baker", BAKER)) == []
    assert codes(await server.register("Keeper", KEEPER)) == []  # itself
    assert codes(await server.register("Other", SAME)) == ["similar_voice"]
    assert "'Other'" in (await check(server.client, SAME))["similar_voice"]
    for name in ("Other", "Keeper"):
        await server.client.delete(f"{VOICES}/{name}")
    assert "similar_voice" not in await check(server.client, SAME)


@refusing
async def test_what_sounds_alike_is_refused(server):
    for _ in range(2):
        assert codes(await server.register("Keeper", KEEPER)) == []
    refused = await server.register("Other", SAME)
    assert refused.status_code == 409
    assert "'Keeper'" in refused.text and "almost the same" in refused.text
    assert "similar_voice" in await check(server.client, SAME)
    listed = (await server.client.get(VOICES)).json()
    assert [voice["name"] for voice in listed["uploaded_voices"]] == ["Keeper"]


@telling
async def test_another_persons_consent_is_told(server):
    consent = await consent_by(server, part(OTHER_SPEECH, is_first=True))
    assert codes(await server.register("Baker", BAKER, consent=consent)) == []
    done = await server.register("Keeper", KEEPER, consent=consent)
    assert codes(done) == ["other_speaker"]


@pytest.mark.environment(SPEAKER_SIMILARITY="refuse", SPEAKER_CONSENT="recording")
async def test_another_persons_consent_is_refused(server):
    consent = await consent_by(server, BAKER)
    refused = await server.register("Keeper", KEEPER, consent=consent)
    assert refused.status_code == 400
    assert "consent" in refused.text and "unlike" in refused.text
    missing = await server.register("Keeper", KEEPER, consent="cons_" + "0" * 32)
    assert missing.status_code == 400 and "unlike" not in missing.text
    assert codes(await server.register("Baker", BAKER, consent=consent)) == []


@refusing
async def test_a_request_that_is_repeated_is_answered_as_before(server):
    form = {
        "data": {"name": "Keeper", "consent": "yes", "precompute": "false"},
        "files": {"audio_sample": ("clip.wav", KEEPER, "audio/wav")},
        "headers": {"Idempotency-Key": "k" * 16},
    }
    assert codes(await server.client.post(VOICES, **form)) == []
    await server.client.patch(f"{VOICES}/Keeper", json={"name": "Another"})
    assert codes(await server.client.post(VOICES, **form)) == []
    assert (await server.register("Keeper", KEEPER)).status_code == 409


@telling
async def test_without_the_catalogue_nothing_is_told_or_fails(server, monkeypatch):
    assert codes(await server.register("Keeper", KEEPER)) == []

    def fail(*_):
        raise StorageError("the disk is gone")

    monkeypatch.setattr(voice_timbre, "of_tenant", fail)
    assert codes(await server.register("Other", SAME)) == []
    assert "similar_voice" not in await check(server.client, SAME)


@refusing
async def test_each_clip_of_a_voice_is_compared(server, monkeypatch):
    consent = await consent_by(server, BAKER)
    comparison = server.handler._comparison
    joined = ReferenceAudio.joined([decode(c).audio for c in (BAKER, KEEPER)])
    upload = Upload(name="Both", consent=consent)
    with pytest.raises(InvalidSpeakerError, match="unlike"):
        await asyncio.to_thread(comparison.compare, ALONE, upload, joined)
    # A voice of both is known by its second clip as well.
    registered = (await server.register("Tone", wav(pitch_hz=120.0))).json()["voice"]
    store, sha = server.service.store, registered["audio_sha256"]
    both = timbre.TimbreEncoder().vectors(joined)
    assert len(both) == 2
    with store.database.write() as db:
        db.execute(voice_timbre.voice_timbre.delete())
        voice_timbre.keep(db, store.last_generation(), sha, b"".join(both))
    for clip in (SAME, BAKER):
        assert "'Tone'" in (await check(server.client, clip))["similar_voice"]


@refusing
async def test_a_lost_consent_recording_is_refused(server):
    consent = await consent_by(server, BAKER)
    for path in (server.directory / "store").rglob("audio.*"):
        path.unlink()
    refused = await server.register("Baker", BAKER, consent=consent)
    assert refused.status_code == 400 and "recording is lost" in refused.text


async def test_texts_that_cannot_be_kept_are_a_400_that_names_the_field(server):
    half = r'{"instructions": "\ud83d"}'
    for text in ("[" * 480 + "]" * 480, "[" * 4000 + "]" * 4000, half):
        for field in ("aliases", "settings"):
            refused = await server.register("Ann", KEEPER, **{field: text})
            assert refused.status_code == 400 and field in refused.text, refused.text


async def test_voices_of_before_or_of_a_bundle_are_heard(server, monkeypatch):
    await server.register("Keeper", KEEPER)
    await server.register("Tone", wav(pitch_hz=120.0))  # nobody speaks
    assert codes(await server.register("Other", SAME)) == []  # it is off
    bundle = (await server.client.get(f"{VOICES}/Keeper/bundle")).content
    await server.client.delete(f"{VOICES}/Keeper")
    monkeypatch.setattr(similarity, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(similarity, "_ROUNDS_OF_NEW", 2)
    store, failures = server.service.store, [StorageError("down"), RuntimeError("bug")]
    read = store.read_audio

    def read_audio(sha):
        if failures:
            raise failures.pop()
        return read(sha)

    monkeypatch.setattr(store, "read_audio", read_audio)
    encoder = timbre.TimbreEncoder()
    comparison = similarity.Comparison(store, encoder, refuses=False)
    try:
        await soon(lambda: len(vectors(store)) == 1)
        file = {"bundle": ("x.voice", bundle)}
        assert (await server.client.post(f"{VOICES}/import", files=file)).is_success
        await soon(lambda: len(vectors(store)) == 2)
        with store.database.read() as db:
            assert voice_timbre.next_unheard(db, 0)[1] is None  # the tone was heard
    finally:
        comparison.shutdown()


@telling
async def test_no_tenant_is_told_of_others(host):
    assert codes(await host.us.register("Keeper", KEEPER)) == []
    assert codes(await host.them.register("Other", SAME)) == []
    assert "similar_voice" not in await check(host.them.client, BAKER)
    assert "'Other'" in (await check(host.them.client, KEEPER))["similar_voice"]


@telling
async def test_the_command_line_says_it(served, tmp_path):
    (same := tmp_path / "same.wav").write_bytes(SAME)
    for name, path in (("Keeper", SPEECH.path), ("Other", same)):
        add = "voices", "add", name, path, "--consent", "yes"
        done = await run(*add, url=served.url)
        assert done.status == 0, done.err
    assert "'Keeper' is there already" in done.out + done.err


def test_a_server_without_the_encoder_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(timbre, "_PACKAGE", "nobody-has-this")
    with pytest.raises(ConfigError, match="pip install --no-deps resemblyzer"):
        timbre.TimbreEncoder()
