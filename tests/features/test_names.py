"""Aliases of voices, the voice that speaks for nobody, and lists of names."""

import json

import pytest

from tests.cli_runs import run
from tests.contract.test_cli_voices import clip_bytes
from tests.in_process_workers import clip, decoded, new_speaker
from tests.speaking import WAYS, data_url, refusal, registered, wav
from tests.two_tenants import file_of
from vllm_tts_cache.catalogue import pages, schema
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import SpeakerChanges
from vllm_tts_cache.entrypoints.http import models
from vllm_tts_cache.errors import InvalidSpeakerError, SpeakerExistsError
from vllm_tts_cache.speaker.reference import SpeakerRef

VOICES = "/v1/audio/voices"


def spoken(server):
    """The audio of the last prompt."""
    ref = SpeakerRef.from_info(server.engine._info(server.engine.prompts[-1]))
    return None if ref is None else ref.audio_sha256


def add(store, name, *aliases, seed=0):
    extras = {"aliases": list(aliases)} if aliases else {}
    new = new_speaker(name, clip(seed), extras=extras)
    done = store.registrations.register(new, decoded(clip(seed)))
    if done.deletion is not None:
        store.remove_files(done.deletion)
    return done.record


def change(store, voice, **given):
    return store.registrations.change(voice, SpeakerChanges(given)).record


@pytest.mark.every_backend
def test_an_alias_finds_one_voice_until_it_is_gone(open_here):
    store = open_here()
    ann = add(store, "Ann", "Alloy", "nova", "ALLOY ")
    assert ann.extras == {"aliases": ["ALLOY", "nova"]}
    for alias in ("alloy", " NOVA", "Ann", ann.speaker_id):
        assert store.find(alias).record == ann
    assert store.names(Page(limit=9, search="ova")) == ["Ann"]
    add(store, "Bob", seed=1)
    for name, aliases in (("Bob", ["alloy"]), ("Bob", ["ann"]), ("Ann", ["x", "BOB"])):
        with pytest.raises(SpeakerExistsError, match=r"Ann|Bob"):
            change(store, name, aliases=aliases)
    with pytest.raises(SpeakerExistsError, match=r"Voice 'Ann' .* alias"):
        add(store, "Nova", seed=2)
    with pytest.raises(SpeakerExistsError, match=r"Voice 'Ann' .* alias"):
        change(store, "Bob", name="NOVA")
    with pytest.raises(InvalidSpeakerError, match="alias of 'Ann'"):
        store.registrations.delete("alloy")
    # Registered anew, by a name that was its alias, and without one.
    assert add(store, "Ann", seed=3).extras == ann.extras
    assert change(store, "nova", name="Nova").extras == ann.extras
    assert store.find("nova").record.name == "Nova" and store.find("ann") is None
    assert store.find("alloy").record.speaker_id == ann.speaker_id
    assert change(store, "alloy", aliases=None).extras_json is None
    assert store.find("alloy") is None
    assert change(store, "Bob", aliases=["alloy"]).extras == {"aliases": ["alloy"]}
    store.remove_files(store.registrations.delete("Bob"))
    assert store.find("alloy") is None
    add(store, "alloy", seed=1)


WRONG = [["default"], ["a/b"], [""], ["x" * 129], [5], "alloy", {"a": "b"}, 5, 0, {}]
WRONG += [[f"{number}" for number in range(21)], ["a\0b"]]


@pytest.mark.parametrize("aliases", WRONG)
async def test_aliases_that_cannot_be_are_a_400(server, aliases):
    await registered(server)
    answers = [
        await server.register("Bob", wav(), aliases=json.dumps(aliases)),
        await server.client.patch(f"{VOICES}/Ann", json={"aliases": aliases}),
    ]
    for answer in answers:
        assert answer.status_code == 400
        assert "aliases" in answer.json()["error"]["message"]
    assert (await server.client.get(f"{VOICES}/Bob")).status_code == 404


async def test_each_way_to_speak_takes_an_alias(server):
    sha = await registered(server)
    for path, names in ((f"{VOICES}/Ann", ["alloy"]), (f"{VOICES}/alloy", ["a", "b"])):
        changed = await server.client.patch(path, json={"aliases": names})
        assert changed.json()["voice"]["aliases"] == names
    for speak in WAYS:
        server.engine.prompts.clear()
        assert await refusal(speak, server, voice="B") is None
        assert spoken(server) == sha
    gone = await server.speak(voice="alloy")
    assert gone.status_code == 400
    told = gone.json()["error"]["message"]
    assert 'PATCH /v1/audio/voices/NAME with {"aliases": ["alloy"]}' in told
    assert (await server.client.delete(f"{VOICES}/b")).status_code == 400


async def test_aliases_are_their_tenants(host):
    voices = []
    for side in (host.us, host.them):
        made = await side.register("Ann", side.clip(), aliases='["alloy"]')
        voices.append(made.json()["voice"]["audio_sha256"])
    for side, sha in zip((host.us, host.them), voices, strict=True):
        assert (await side.speak(voice="alloy")).status_code == 200
        assert host.spoken() == sha
    await host.us.client.patch(f"{VOICES}/Ann", json={"aliases": []})
    assert (await host.us.speak(voice="alloy")).status_code == 400
    assert (await host.them.speak(voice="alloy")).status_code == 200


async def test_a_bundle_and_the_command_line_have_aliases(served, tmp_path):
    file, sheet = tmp_path / "clip.wav", tmp_path / "voices.csv"
    file.write_bytes(clip_bytes())
    sheet.write_text("name,audio,consent,aliases\nBob,clip.wav,yes,echo; fable\n")

    async def voices(*arguments):
        done = await run("voices", *arguments, url=served.url)
        return done.status, done.out + done.err

    added = "add", "Ann", file, "--consent", "yes", "--alias", "alloy"
    assert (await voices(*added))[0] == 0
    assert "1 unchanged" in (await voices(*added))[1]
    assert (await voices("add", "--manifest", sheet))[0] == 0
    assert "echo, fable" in (await voices("show", "Bob"))[1]
    assert (await voices("edit", "echo", "--alias", "nova"))[0] == 0
    assert (await voices("show", "fable"))[0] == 4
    assert (await voices("export", "alloy", "--out", tmp_path / "a.voice"))[0] == 0
    importing = "import", tmp_path / "a.voice", "--name", "Cid", "--on-conflict"
    assert "alias" in (await voices(*importing, "fail"))[1]
    for _ in range(2):  # it is there the second time
        assert (await voices(*importing, "rename"))[0] == 0
    assert "aliases" not in (await served.client.get(f"{VOICES}/Cid")).text
    assert (await served.client.get(f"{VOICES}/Cid (2)")).status_code == 404
    assert "alias" in (await voices("add", "alloy", file, "--consent", "yes"))[1]
    twice = *added[:-1], "Alloy", "--alias", "ALLOY"
    assert (await voices(*twice, "--replace"))[0] == 0
    assert "1 unchanged" in (await voices(*twice))[1]
    await voices("export", "Ann", "--out", tmp_path / "a.voice", "--replace")
    assert (await voices("rm", "Ann", "--yes"))[0] == 0
    assert (await voices("import", tmp_path / "a.voice"))[0] == 0
    shown = (await served.client.get(f"{VOICES}/alloy")).json()["voice"]
    assert shown["name"] == "Ann"
    assert (await voices("edit", "Ann", "--clear", "aliases"))[0] == 0
    assert (await served.client.get(f"{VOICES}/alloy")).status_code == 404


@pytest.mark.every_backend
def test_what_an_expired_voice_was_called_is_free(open_here):
    store = open_here()
    add(store, "Exp", "shimmer", "coral")
    add(store, "Old", seed=3)
    with store.database.write() as db:
        db.execute(schema.speaker.update().values(expires_at=1.0))
    assert store.find("shimmer") is None
    assert add(store, "shimmer", seed=1).name == "shimmer"
    add(store, "Bob", "coral", "exp", seed=2)
    assert [store.find(n).record.name for n in ("coral", "Exp")] == ["Bob", "Bob"]
    with pytest.raises(SpeakerExistsError):
        add(store, "Exp", seed=4)
    assert store.verify() == []
    store.registrations.change("shimmer", SpeakerChanges({"name": "Old"}))
    store.registrations.delete_expired(9)
    for each in store.unfinished_deletions():
        store.remove_files(each)
    assert store.find("coral").record.name == "Bob"


def test_a_page_counts_what_aliases_take(store):
    names = [f"{number:02}" + "x" * 126 for number in range(20)]
    for number in range(3):
        aliases = (f"{number}{name[1:]}" for name in names)
        add(store, f"v{number}", *aliases, seed=number)
    found = store.records(Page(limit=9))
    shown = sum(len(json.dumps(models.voice(each))) for each in found)
    assert pages._bytes_in_answer(found[0]) >= shown / 3


@pytest.mark.environment(SPEAKER_DEFAULT_VOICE="ann")
async def test_the_default_voice_speaks_for_nobody(server):
    missing = await server.speak()
    assert missing.status_code == 400 and "'ann'" in missing.json()["error"]["message"]
    sha = await registered(server)
    for named in ({}, {"voice": "default"}, {"voice": " "}, {"voice": None}):
        for speak in WAYS:
            assert await refusal(speak, server, **named) is None, (speak, named)
            assert spoken(server) == sha
    said = await server.speak(ref_audio=data_url(pitch_hz=210.0), ref_text="words")
    assert said.status_code == 200, said.text
    assert spoken(server) != sha
    listed = (await server.client.get(VOICES)).json()
    assert listed["voices"] == ["Ann", "default"]
    bob = await registered(server, "Bob", pitch_hz=190.0)
    batch = {"voice": "Bob", "items": [{"input": "Hi.", "voice": "default"}]}
    await server.client.post("/v1/audio/speech/batch", json=batch)
    assert spoken(server) == bob


async def test_each_tenant_has_its_default(host):
    for side in (host.us, host.them):
        await side.register(side.tenant, side.clip())
    entries = json.loads(file_of(host.us, host.them))
    entries["tenants"][0]["default_voice"] = "acme"
    host.path.write_text(json.dumps(entries))
    host.server.service.tenants.reload()
    assert (await host.us.speak()).status_code == 200
    assert (await host.them.speak()).status_code == 400
