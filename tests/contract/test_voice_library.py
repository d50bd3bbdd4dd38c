"""What a voice says beside its audio, over the host's real application."""

import asyncio
import io
import time

import numpy as np
import pytest
import soundfile

from tests.speaking import wav
from tests.store_samples import voice
from tests.waiting import soon
from vllm_tts_cache.audio.decode import decode_clips
from vllm_tts_cache.catalogue.names import CONSENT_PREFIX, new_id

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"


async def add_consent(server, **fields):
    form = {"name": "Ann's", "language": "de"} | fields
    file = {"recording": ("c.wav", wav(), "audio/wav")}
    return await server.client.post(CONSENTS, data=form, files=file)


async def change(server, voice, **given):
    return await server.client.patch(f"{VOICES}/{voice}", json=given)


async def test_a_registration_says_all_that_a_change_may(server):
    fields = {
        "language": "pt-BR",
        "labels": '{"Team": "News"}',
        "expires_at": "2100-01-01T00:00:00Z",
    }
    answer = (await server.register("Ann", wav(), **fields)).json()
    voice = answer["voice"]
    assert (voice["language"], voice["labels"]) == ("pt-BR", {"Team": "News"})
    assert voice["expires_at"] == 4102444800
    same = ("id", "object", "type", "name", "created_at")
    assert all(answer[field] == voice[field] for field in same)
    shown = (await server.client.get(f"{VOICES}/{voice['id']}")).json()
    assert shown["voice"] == voice


async def test_a_change_is_shown_and_leaves_the_rest(server):
    before = (await server.register("Ann", wav(), ref_text="words")).json()["voice"]
    new = {"name": "Bea", "labels": {"a": "b"}, "speaker_description": "warm"}
    answer = await change(server, "ann", **new)
    assert answer.status_code == 200, answer.text
    after = answer.json()["voice"]
    assert (await change(server, "Cid", name="Dan")).status_code == 404
    assert after == before | new | {"updated_at": after["updated_at"]}
    assert (await server.client.get(f"{VOICES}/Ann")).status_code == 404
    spoken = await server.speak(voice="Bea")
    assert spoken.status_code == 200, spoken.text


async def test_a_transcript_opens_modes_and_taking_it_away_closes_them(server):
    await server.register("Ann", wav())
    (plain,) = (await server.client.get(f"{VOICES}/Ann")).json()["modes"]
    with_text = (await change(server, "Ann", ref_text="words")).json()
    assert with_text["voice"]["ref_text"] == "words"
    assert set(with_text["modes"]) > {plain}
    without = (await change(server, "Ann", ref_text=None)).json()
    assert without["modes"] == [plain] and "ref_text" not in without["voice"]


WRONG_CHANGES = (
    ("body", {}),
    ("name", {"name": None}),
    ("labels", {"labels": "news"}),
    ("expires_at", {"expires_at": "tomorrow"}),
    ("expires_at", {"expires_at": 1}),
    ("audio_sample", {"audio_sample": "x"}),
)


async def test_a_change_that_cannot_be_is_a_400_that_names_it(server):
    before = (await server.register("Ann", wav())).json()["voice"]
    for named, given in WRONG_CHANGES:
        answer = await change(server, "Ann", **given)
        assert answer.status_code == 400, given
        assert named in answer.json()["error"]["message"]
    over_64_kib = await change(server, "Ann", ref_text="x" * 70_000)
    assert over_64_kib.status_code == 413
    assert (await server.client.get(f"{VOICES}/Ann")).json()["voice"] == before


async def test_the_library_is_searched_filtered_and_sorted(server):
    for name, label in (("Ann", "news"), ("Bea", "sports"), ("Cid", "news")):
        await server.register(name, wav(), labels=f'{{"team": "{label}"}}')

    async def listed(**query):
        answer = (await server.client.get(VOICES, params=query)).json()
        shown = [voice["name"] for voice in answer["uploaded_voices"]]
        return shown, answer.get("next")

    assert await listed(label="Team:NEWS") == (["Ann", "Cid"], None)
    assert await listed(search="sport") == (["Bea"], None)
    first, after = await listed(sort="newest", limit=2)
    assert first == ["Cid", "Bea"]
    assert await listed(sort="newest", limit=2, after=after) == (["Ann"], None)
    for named, query in (
        ("label", {"label": "news"}),
        ("label", {"label": [f"k{n}:v" for n in range(1_100)]}),
        ("label", {"label": ["a:b", "a:c"]}),
        ("sort", {"sort": "loudest"}),
        ("after", {"after": "?", "sort": "oldest"}),
    ):
        answer = await server.client.get(VOICES, params=query)
        assert answer.status_code == 400, query
        assert named in answer.json()["error"]["message"]
    assert (await change(server, "Ann", name="BEA")).status_code == 409


async def test_a_voice_whose_end_has_come_is_gone_with_all_it_had(server):
    end = time.time() + 3600
    voice = (await server.register("Ann", wav(), expires_at=str(end))).json()["voice"]
    assert (await server.speak(voice="Ann")).status_code == 200
    end = time.time() + 2
    assert (await change(server, "Ann", expires_at=end)).status_code == 200
    await asyncio.sleep(max(0.0, end - time.time()) + 0.01)
    assert (await server.speak(voice="Ann")).status_code == 400
    store = server.service.store
    await soon(lambda: store.read_audio(voice["audio_sha256"]) is None)
    assert (await server.client.get(VOICES)).json()["uploaded_voices"] == []


@pytest.mark.parametrize(
    ("subtype", "kind"), [("PCM_16", "audio/flac"), ("FLOAT", "audio/wav")]
)
async def test_the_reference_comes_back_sample_by_sample(server, subtype, kind):
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 30_000).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, samples, 24_000, subtype, format="WAV")
    await server.register("Ann", file.getvalue())
    answer = await server.client.get(f"{VOICES}/Ann/audio")
    assert answer.headers["content-type"] == kind
    heard, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    file.seek(0)
    sent, _ = soundfile.read(file, dtype="float32")
    assert rate == 24_000 and np.array_equal(heard, sent)


async def test_what_has_no_audio_gives_none_back(server):
    assert (await server.embed("Ann")).status_code == 200
    for name in ("Ann", "nobody"):
        answer = await server.client.get(f"{VOICES}/{name}/audio")
        assert answer.status_code == 404


@pytest.mark.environment(SPEAKER_AUDIO_DOWNLOAD="0")
async def test_an_operator_keeps_references_in(server):
    await server.register("Ann", wav())
    for what in ("audio", "bundle"):
        answer = await server.client.get(f"{VOICES}/Ann/{what}")
        assert answer.status_code == 403
        assert "SPEAKER_AUDIO_DOWNLOAD" in answer.json()["error"]["message"]


@pytest.mark.environment(SPEAKER_CONSENT="recording")
async def test_a_recording_is_needed_where_the_operator_says_so(server):
    for text in ("yes", new_id(CONSENT_PREFIX)):
        refused = await server.register("Ann", wav(), consent=text)
        assert refused.status_code == 400
        assert "voice_consents" in refused.json()["error"]["message"]
    consent = (await add_consent(server)).json()
    done = await server.register("Ann", wav(), consent=consent["id"])
    assert done.json()["voice"]["consent_id"] == consent["id"]
    kept = await server.client.delete(f"{CONSENTS}/{consent['id']}")
    assert kept.status_code == 409
    assert kept.json()["voices"] == [{"id": done.json()["id"], "name": "Ann"}]


async def test_deleting_a_recording_leaves_nothing_of_it(server):
    consent = (await add_consent(server)).json()
    store = server.service.store
    sha = store.consents.get(consent["id"]).audio_sha256
    gone = await server.client.delete(f"{CONSENTS}/{consent['id']}")
    assert gone.status_code == 200, gone.text
    assert store.read_audio(sha) is None and store.verify() == []
    for call in (server.client.get, server.client.delete):
        assert (await call(f"{CONSENTS}/{consent['id']}")).status_code == 404


async def test_a_clip_is_checked_without_being_registered(server):
    file = {"audio_sample": ("c.wav", wav(), "audio/wav")}
    answer = await server.client.post(f"{VOICES}/check", files=file)
    assert answer.status_code == 200, answer.text
    assert answer.json()["verdict"] == "poor"  # a tone, and nobody speaks
    assert "no_speech" in {reason["code"] for reason in answer.json()["reasons"]}
    assert (await server.client.get(VOICES)).json()["uploaded_voices"] == []
    done = (await server.register("Ann", wav())).json()
    assert done["quality"] == answer.json()
    unchecked = (await server.register("Bea", wav(), check="false")).json()
    assert "quality" not in unchecked
    nothing = {"audio_sample": ("c.wav", b"RIFF", "audio/wav")}
    refused = await server.client.post(f"{VOICES}/check", files=nothing)
    assert refused.status_code == 400


@pytest.mark.parametrize("ref_text", ["x" * 2_001, "a\0b"])
async def test_a_check_takes_the_transcripts_of_a_registration(server, ref_text):
    form = {"name": "Ann", "consent": "y", "ref_text": ref_text}
    file = {"audio_sample": ("c.wav", wav(), "audio/wav")}
    for path in (VOICES, f"{VOICES}/check"):
        answer = await server.client.post(path, data=form, files=file)
        assert answer.status_code == 400, answer.text
        assert "Invalid ref_text" in answer.json()["error"]["message"]


@pytest.mark.environment(SPEAKER_MIN_QUALITY="fair")
async def test_an_operator_refuses_poor_clips(server):
    answer = await server.register("Ann", wav(), check="false")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "SPEAKER_MIN_QUALITY" in message and "holds no speech" in message
    assert (await server.client.get(VOICES)).json()["uploaded_voices"] == []


async def test_several_clips_are_refused_and_none_is_taken_for_all(server):
    clips = [("audio_sample", ("c.wav", wav(), "audio/wav"))] * 2
    form = {"name": "Ann", "consent": "yes", "ref_text": "for both"}
    answer = await server.client.post(VOICES, data=form, files=clips)
    assert answer.status_code == 400
    assert "2 clips" in answer.json()["error"]["message"]
    assert "takes one clip" in answer.json()["error"]["message"]
    assert (await server.client.get(VOICES)).json()["uploaded_voices"] == []


async def test_an_empty_field_is_no_clip(server):
    """As some clients send what was not filled in."""
    empty = {"audio_sample": "", "ref_text": ""}
    answer = await server.embed("Raw", **empty)
    assert answer.status_code == 200, answer.text
    form = {"name": "Raw", "consent": "y", **empty}
    answer = await server.client.post(VOICES, data=form)
    assert answer.status_code == 400
    assert "give either audio_sample or" in answer.json()["error"]["message"]


async def test_a_voice_of_several_clips_of_another_models_is_not_spoken_here(server):
    """It was registered in this directory while a model that takes them was served."""
    audio = decode_clips([wav(), wav(pitch_hz=330)])
    new = voice("Ann", audio, clip_starts=audio.audio.clip_starts)
    server.service.store.registrations.register(new, audio)
    said = "there are 2 clips, and Qwen3-TTS takes one clip to a voice"
    shown = (await server.client.get(f"{VOICES}/Ann")).json()
    assert (shown["cache_status"], shown["modes"]) == ("unsupported", [])
    assert said in shown["error"] and len(shown["voice"]["clips"]) == 2
    changed = await change(server, "Ann", ref_text="one\ntwo")
    assert changed.status_code == 200, changed.text
    asked = server.speak(voice="Ann"), server.client.post(f"{VOICES}/Ann/cache")
    for answer in [await each for each in asked]:
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    assert server.engine.prompts == [] and set(server.encodes.values()) <= {0}
    bundle = await server.client.get(f"{VOICES}/Ann/bundle")
    file = {"bundle": ("Ann.voice", bundle.content)}
    form = {"name": "Bea"}
    answer = await server.client.post(f"{VOICES}/import", files=file, data=form)
    assert answer.status_code == 400 and "takes one clip" in answer.text
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 200
    assert server.service.store.verify() == []


async def test_the_routes_of_voices_and_of_recordings_delete_their_own(server):
    consent = (await add_consent(server)).json()
    await server.register("Ann", wav())
    service = server.service
    service.store.registrations.delete("Ann")  # and nobody was told
    wrong = [f"{CONSENTS}/Ann", f"{VOICES}/{consent['id']}"]
    for path in wrong:
        assert (await server.client.delete(path)).status_code == 404
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 200
    assert (
        await server.client.delete(f"{CONSENTS}/{consent['id']}")
    ).status_code == 200
