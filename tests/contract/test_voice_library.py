"""What a voice says beside its audio, over the host's real application."""

import asyncio
import io
import time

import numpy as np
import pytest
import soundfile

from tests.contract.test_speech import wav
from tests.speech_server import Server, running
from tests.store_samples import voice
from tests.two_tenants import two_tenants
from tests.waiting import soon
from vllm_tts_cache.audio.clips import decode_clips
from vllm_tts_cache.entrypoints import previews, voice_models
from vllm_tts_cache.entrypoints.attach import is_api_route, routers

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
HEADER = "x-speaker-preview"


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


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
        "pinned": "true",
        "expires_at": "2100-01-01T00:00:00Z",
    }
    answer = (await server.register("Ann", wav(), **fields)).json()
    voice = answer["voice"]
    assert (voice["language"], voice["labels"]) == ("pt-BR", {"Team": "News"})
    assert voice["pinned"] is True and voice["expires_at"] == 4102444800
    same = ("id", "object", "type", "name", "created_at")
    assert all(answer[field] == voice[field] for field in same)
    shown = (await server.client.get(f"{VOICES}/{voice['id']}")).json()
    assert shown["voice"] == voice
    voice_models.Registered.model_validate(answer)
    voice_models.VoiceStatus.model_validate(shown)


async def test_a_change_is_shown_and_leaves_the_rest(server):
    before = (await server.register("Ann", wav(), ref_text="words")).json()["voice"]
    answer = await change(
        server, "ann", name="Bea", labels={"a": "b"}, speaker_description="warm"
    )
    assert answer.status_code == 200, answer.text
    after = answer.json()["voice"]
    new = {"name": "Bea", "labels": {"a": "b"}, "speaker_description": "warm"}
    new["updated_at"] = after["updated_at"]
    assert after == before | new
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


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "body"),
        ({"name": None}, "name"),
        ({"name": "default"}, "name"),
        ({"labels": {"a": ""}}, "labels"),
        ({"language": "not a tag"}, "language"),
        ({"expires_at": "tomorrow"}, "expires_at"),
        ({"expires_at": 1}, "expires_at"),
        ({"audio_sample": "x"}, "audio_sample"),
        ({"pinned": "perhaps"}, "pinned"),
    ],
)
async def test_a_change_that_cannot_be_is_a_400_that_names_it(server, given, named):
    before = (await server.register("Ann", wav())).json()["voice"]
    answer = await change(server, "Ann", **given)
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    shown = (await server.client.get(f"{VOICES}/Ann")).json()
    assert shown["voice"] == before


async def test_a_name_that_is_taken_is_a_409_and_an_unknown_voice_a_404(server):
    await server.register("Ann", wav())
    await server.register("Bea", wav())
    assert (await change(server, "Ann", name="BEA")).status_code == 409
    assert (await change(server, "Cid", name="Dan")).status_code == 404


async def test_a_change_has_64_KiB_at_most(server):
    await server.register("Ann", wav())
    answer = await change(server, "Ann", ref_text="x" * 70_000)
    assert answer.status_code == 413


async def test_the_library_is_searched_filtered_and_sorted(server):
    for name, label in (("Ann", "news"), ("Bea", "sports"), ("Cid", "news")):
        await server.register(name, wav(), labels=f'{{"team": "{label}"}}')

    async def listed(**query):
        answer = (await server.client.get(VOICES, params=query)).json()
        voice_models.VoiceList.model_validate(answer)
        shown = [voice["name"] for voice in answer["uploaded_voices"]]
        return shown, answer.get("next")

    assert await listed(label="Team:NEWS") == (["Ann", "Cid"], None)
    assert await listed(search="sport") == (["Bea"], None)
    first, after = await listed(sort="newest", limit=2)
    assert first == ["Cid", "Bea"]
    assert await listed(sort="newest", limit=2, after=after) == (["Ann"], None)
    for query in (
        {"label": "news"},
        {"sort": "loudest"},
        {"after": "?", "sort": "oldest"},
    ):
        answer = await server.client.get(VOICES, params=query)
        assert answer.status_code == 400, query


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
    dim = server.engine.model_config.hf_config.talker_config.hidden_size
    form = {"name": "Ann", "consent": "y", "speaker_embedding": str([0.5] * dim)}
    assert (await server.client.post(VOICES, data=form)).status_code == 200
    for name in ("Ann", "nobody"):
        answer = await server.client.get(f"{VOICES}/{name}/audio")
        assert answer.status_code == 404


async def test_an_operator_keeps_references_in(
    default_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPEAKER_AUDIO_DOWNLOAD", "0")
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        await server.register("Ann", wav())
        answer = await server.client.get(f"{VOICES}/Ann/audio")
        assert answer.status_code == 403
        assert "SPEAKER_AUDIO_DOWNLOAD" in answer.json()["error"]["message"]


async def test_a_recording_is_needed_where_the_operator_says_so(
    default_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPEAKER_CONSENT", "recording")
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        refused = await server.register("Ann", wav(), consent="yes")
        assert refused.status_code == 400
        assert "voice_consents" in refused.json()["error"]["message"]
        consent = (await add_consent(server)).json()
        voice_models.Consent.model_validate(consent)
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
    voice_models.ConsentDeleted.model_validate(gone.json())
    assert store.read_audio(sha) is None and store.verify() == []
    for call in (server.client.get, server.client.delete):
        assert (await call(f"{CONSENTS}/{consent['id']}")).status_code == 404


@pytest.mark.parametrize(
    ("fields", "named"), [({"language": "x!"}, "language"), ({"name": "\t"}, "name")]
)
async def test_a_recording_that_cannot_be_is_a_400(server, fields, named):
    answer = await add_consent(server, **fields)
    assert answer.status_code == 400
    assert f"Invalid {named}" in answer.json()["error"]["message"]
    assert (await server.client.get(CONSENTS)).json()["data"] == []


async def test_a_voice_moves_in_a_bundle_and_is_ready(server):
    await server.register("Ann", wav(), ref_text="words", labels='{"team": "news"}')
    await server.client.post(f"{VOICES}/Ann/cache")
    spoken = (await server.speak(voice="Ann")).content
    bundle = await server.client.get(f"{VOICES}/Ann/bundle")
    assert bundle.status_code == 200, bundle.text
    assert bundle.headers["content-disposition"].endswith("''Ann.voice")
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 200
    encodes = dict(server.encodes)
    file = {"bundle": ("Ann.voice", bundle.content)}
    answer = await server.client.post(f"{VOICES}/import", files=file)
    assert answer.status_code == 200, answer.text
    voice_models.Imported.model_validate(answer.json())
    (imported,) = answer.json()["imported"]
    assert imported["encodings_kept"] > 0 and imported["encodings_left"] == 0
    assert imported["voice"]["labels"] == {"team": "news"}
    status = (await server.client.get(f"{VOICES}/Ann/cache")).json()["cache_status"]
    assert status == "ready"
    assert (await server.speak(voice="Ann")).content == spoken
    assert server.encodes == encodes
    taken = await server.client.post(f"{VOICES}/import", files=file)
    assert taken.status_code == 409
    named = {"on_conflict": "rename"}
    again = await server.client.post(f"{VOICES}/import", files=file, data=named)
    assert again.json()["imported"][0]["voice"]["name"] == "Ann (2)"


@pytest.mark.parametrize("name", ["default", "a/b"])
async def test_a_bundle_is_called_what_a_voice_may_be_called(server, name):
    await server.register("Ann", wav())
    bundle = await server.client.get(f"{VOICES}/Ann/bundle")
    file = {"bundle": ("Ann.voice", bundle.content)}
    answer = await server.client.post(
        f"{VOICES}/import", files=file, data={"name": name}
    )
    assert answer.status_code == 400


async def test_a_clip_is_checked_without_being_registered(server):
    file = {"audio_sample": ("c.wav", wav(), "audio/wav")}
    answer = await server.client.post(f"{VOICES}/check", files=file)
    assert answer.status_code == 200, answer.text
    voice_models.Quality.model_validate(answer.json())
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
async def test_a_check_takes_the_transcripts_that_a_registration_takes(
    server, ref_text
):
    form = {"name": "Ann", "consent": "y", "ref_text": ref_text}
    file = {"audio_sample": ("c.wav", wav(), "audio/wav")}
    for path in (VOICES, f"{VOICES}/check"):
        answer = await server.client.post(path, data=form, files=file)
        assert answer.status_code == 400, answer.text
        assert "Invalid ref_text" in answer.json()["error"]["message"]


async def test_an_operator_refuses_poor_clips(
    default_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPEAKER_MIN_QUALITY", "fair")
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        answer = await server.register("Ann", wav(), check="false")
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "SPEAKER_MIN_QUALITY" in message and "speaking" in message
        assert (await server.client.get(VOICES)).json()["uploaded_voices"] == []


async def test_a_preview_is_spoken_once_and_goes_with_the_voice(server):
    voice = (await server.register("Ann", wav(), language="de-CH")).json()["voice"]
    path = f"{VOICES}/{voice['id']}/preview"
    assert (await server.client.get(path)).status_code == 404
    made = await server.client.post(path)
    assert made.status_code == 200, made.text
    assert made.headers["x-speaker-preview"] == "made"
    assert made.content.startswith(b"RIFF")
    num_prompts = len(server.engine.prompts)
    for again in (await server.client.get(path), await server.client.post(path)):
        assert again.headers["x-speaker-preview"] == "kept"
        assert again.content == made.content
    assert len(server.engine.prompts) == num_prompts
    other = await server.client.post(path, json={"text": "Etwas anderes."})
    assert other.headers["x-speaker-preview"] == "made"
    await change(server, "Ann", ref_text="words")
    assert (await server.client.get(path)).status_code == 404
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 200
    assert server.service.store.verify() == []
    assert list((server.directory / "store").rglob("*.safetensors")) == []


async def test_a_preview_that_fails_says_why_and_keeps_nothing(server):
    await server.register("Ann", wav())
    path = f"{VOICES}/Ann/preview"
    for body in ({"text": "x" * 301}, {"texts": "x"}, {"text": 5}):
        answer = await server.client.post(path, json=body)
        assert answer.status_code == 400, answer.text
    for encoder in server.encoders:
        encoder.errors = [RuntimeError("broken")] * 9
    answer = await server.client.post(path)
    assert answer.status_code == 500
    assert (await server.client.get(path)).status_code == 404
    assert (await server.client.post(f"{VOICES}/nobody/preview")).status_code == 404


async def test_previews_that_wait_are_bounded(server):
    await server.register("Ann", wav())
    path = f"{VOICES}/Ann/preview"
    for encoder in server.encoders:
        encoder.gate.clear()
    asked = [
        asyncio.create_task(server.client.post(path, json={"text": f"{n}."}))
        for n in range(12)
    ]
    await soon(lambda: sum(task.done() for task in asked) == 4)
    for encoder in server.encoders:
        encoder.gate.set()
    statuses = sorted([(await task).status_code for task in asked])
    assert statuses == [200] * 8 + [503] * 4


async def test_tenants_take_turns_with_previews(
    default_checkpoint, tmp_path, monkeypatch
):
    """However many one asks for, the other's is the next."""
    path = f"{VOICES}/Ann/preview"
    done = []

    async def ask(side, text):
        answer = await side.client.post(path, json={"text": text})
        done.append((side.tenant, answer.status_code))

    async with two_tenants(default_checkpoint, tmp_path, monkeypatch) as host:
        for side in (host.us, host.them):
            await side.register("Ann", side.clip())
        for encoder in host.server.encoders:
            encoder.gate.clear()
        many = [asyncio.create_task(ask(host.us, f"{n}.")) for n in range(12)]
        await soon(lambda: len(done) == 4)
        assert {status for _, status in done} == {503}
        done.clear()
        one = asyncio.create_task(ask(host.them, "1."))
        lines = host.server.service.previews._lines
        await soon(lambda: host.them.tenant in lines)
        for encoder in host.server.encoders:
            encoder.gate.set()
        await asyncio.gather(one, *many)
        assert done[:2] == [(host.us.tenant, 200), (host.them.tenant, 200)]
        assert len(done) == 9 and {status for _, status in done} == {200}
        assert not lines


async def test_an_engine_that_hangs_keeps_previews_for_a_time_only(
    default_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(previews, "SPEAK_SECONDS", 0.5)
    monkeypatch.setenv("SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS", "1")
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        await server.register("Ann", wav())
        path = f"{VOICES}/Ann/preview"
        assert (await server.client.post(path)).status_code == 200
        speaking, ended = server.engine.generate, []

        async def hanging(**_):
            try:
                await asyncio.Event().wait()
                yield
            finally:
                ended.append(True)

        monkeypatch.setattr(server.engine, "generate", hanging)
        asked = [server.client.post(path, json={"text": f"{n}."}) for n in range(2)]
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 503 and "1.5 s" in answer.text
            assert answer.headers["retry-after"] == "2"
        assert ended == [True, True]  # nobody speaks for them any more
        assert (await server.client.post(path)).headers[HEADER] == "kept"
        monkeypatch.setattr(server.engine, "generate", speaking)
        answer = await server.client.post(path, json={"text": "0."})
        assert answer.headers[HEADER] == "made"


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
    form = {"name": "Raw", "consent": "y", "audio_sample": "", "ref_text": ""}
    dim = server.engine.model_config.hf_config.talker_config.hidden_size
    embedding = str([0.5] * dim)
    answer = await server.client.post(
        VOICES, data=form | {"speaker_embedding": embedding}
    )
    assert answer.status_code == 200, answer.text
    answer = await server.client.post(VOICES, data=form)
    assert answer.status_code == 400
    assert "give either audio_sample or" in answer.json()["error"]["message"]


async def test_a_voice_of_several_clips_of_another_models_is_not_spoken_here(server):
    """It was registered in this directory while a model that takes them was served."""
    audio = decode_clips([wav(), wav(pitch_hz=330)])
    server.service.store.register(
        voice("Ann", audio, clip_starts=audio.audio.clip_starts), audio
    )
    said = "there are 2 clips, and Qwen3-TTS takes one clip to a voice"
    shown = (await server.client.get(f"{VOICES}/Ann")).json()
    assert (shown["cache_status"], shown["modes"]) == ("unsupported", [])
    assert said in shown["error"] and len(shown["voice"]["clips"]) == 2
    changed = await change(server, "Ann", ref_text="one\ntwo")
    assert changed.status_code == 200, changed.text
    refused = [
        await server.speak(voice="Ann"),
        await server.client.post(f"{VOICES}/Ann/cache"),
        await server.client.post(f"{VOICES}/Ann/preview"),
    ]
    for answer in refused:
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


async def test_what_another_clip_says_under_the_id_is_kept_by_nobody(server):
    """A voice is registered over while its preview is spoken."""
    first = (await server.register("Ann", wav())).json()["voice"]
    await server.register("Bea", wav())  # of the same clip
    path = f"{VOICES}/{first['id']}/preview"
    for encoder in server.encoders:
        encoder.gate.clear()
    asked = asyncio.create_task(server.client.post(path))
    await soon(lambda: any(encoder.entered.is_set() for encoder in server.encoders))
    await server.register("Ann", wav(pitch_hz=777))
    for encoder in server.encoders:
        encoder.gate.set()
    answer = await asked
    assert answer.status_code == 200 and answer.headers[HEADER] == "made"
    for name in ("Ann", "Bea"):
        kept = await server.client.get(f"{VOICES}/{name}/preview")
        assert kept.status_code == 404


BY_NAME_OR_ID = [
    ("GET", "{}", {}),
    ("PATCH", "{}", {"json": {"language": "de"}}),
    ("POST", "{}/cache", {}),
    ("GET", "{}/cache", {}),
    ("GET", "{}/audio", {}),
    ("GET", "{}/bundle", {}),
    ("POST", "{}/preview", {}),
    ("GET", "{}/preview", {}),
    ("DELETE", "{}", {}),
]


def test_each_route_of_a_voice_is_among_them():
    path = f"{VOICES}/{{name}}"
    found = {
        (method, route.path.replace(path, "{}"))
        for router in routers()
        for route in filter(is_api_route, router.routes)
        if route.path.startswith(path)
        for method in route.methods
    }
    assert found == {(method, shown) for method, shown, _ in BY_NAME_OR_ID}


@pytest.mark.parametrize(("method", "path", "options"), BY_NAME_OR_ID)
async def test_every_route_takes_a_name_or_an_id(server, method, path, options):
    for by in ("name", "id"):
        voice = (await server.register("Ann", wav())).json()["voice"]
        url = f"{VOICES}/{path.format(voice[by])}"
        if path.endswith("/preview"):
            await server.client.post(f"{VOICES}/Ann/preview")
        answer = await server.client.request(method, url, **options)
        assert answer.status_code == 200, (by, answer.text)
        if method == "DELETE":
            assert answer.json()["id"] == voice["id"]
            assert (await server.client.get(VOICES)).json()["uploaded_voices"] == []


async def test_filters_are_few_and_of_different_keys(server):
    many = [("label", f"k{n}:v") for n in range(1_100)]
    twice = [("label", "a:b"), ("label", "a:c")]
    for query in (many, twice):
        answer = await server.client.get(VOICES, params=query)
        assert answer.status_code == 400
        assert "label" in answer.json()["error"]["message"]


async def test_the_routes_of_voices_and_of_recordings_delete_their_own(server):
    consent = (await add_consent(server)).json()
    await server.register("Ann", wav())
    service = server.service
    service.store.delete("Ann")  # and nobody was told
    wrong = [f"{CONSENTS}/Ann", f"{VOICES}/{consent['id']}"]
    for path in wrong:
        assert (await server.client.delete(path)).status_code == 404
    assert (await server.client.delete(f"{VOICES}/Ann")).status_code == 200
    assert (
        await server.client.delete(f"{CONSENTS}/{consent['id']}")
    ).status_code == 200
