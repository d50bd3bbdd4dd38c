"""``vllm-tts-cache voices`` against the real routes, over a real socket."""

import asyncio
import csv
import os
import signal
import wave
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes
from tests.cli_runs import begun, ended, run
from tests.speech_server import Server, listening, running
from tests.waiting import soon
from vllm_tts_cache.audio.reference import AUDIO
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.speakers import ensure
from vllm_tts_cache.errors import SourceCorruptError
from vllm_tts_cache.families.fish_speech.family import FAMILY as FISH
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.opening import open_existing

RATE_HZ = 8_000
GONE = "http://127.0.0.1:1"


def clip_bytes(seed=0):
    noise = np.random.default_rng(seed).standard_normal(RATE_HZ + 10)
    return sndfile_bytes((0.1 * noise).astype(np.float32), RATE_HZ)


class Gate:
    """A proxy before the application: it counts, and holds up what it is told to."""

    def __init__(self, app):
        self.app = app
        self.num_posts = 0
        self.queries = []  # of what is posted
        self.num_lost = 0  # writes that are done, and whose answers are cut off
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.keys = set()

    async def __call__(self, scope, receive, send):
        headers = dict(scope.get("headers", ()))
        self.keys.add(headers.get(b"authorization"))
        if scope.get("method") == "POST":
            self.num_posts += 1
            self.queries.append(scope["query_string"].decode())
            await self.is_open.wait()
        if scope.get("method") in ("POST", "DELETE") and self.num_lost:
            self.num_lost -= 1
            send = self._cut_off(send)
        await self.app(scope, receive, send)

    def _cut_off(self, send):
        async def without_body(message):
            if message["type"] == "http.response.start":
                await send(message)

        return without_body


class Served(Server):
    """A server behind a proxy, at a URL."""

    gate: Gate
    url: str


@asynccontextmanager
async def serving(server):
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(server))
        server.gate = Gate(server.app)
        port = await stack.enter_async_context(listening(server.gate))
        server.url = f"http://127.0.0.1:{port}"
        yield server


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKER_MAX_UPLOADED", "0")
    directory = tmp_path / "speakers"
    async with serving(Served(default_checkpoint, directory, monkeypatch)) as server:
        yield server


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "clip.wav"
    path.write_bytes(clip_bytes())
    return path


def write_manifest(path, rows, columns=("name", "audio", "consent")):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def write_many(folder, num_voices):
    rows = []
    for number in range(num_voices):
        clip = folder / f"{number}.wav"
        clip.write_bytes(clip_bytes(number))
        rows.append((f"voice {number:03}", clip.name, "signed"))
    return write_manifest(folder / "voices.csv", rows)


async def test_a_voice_is_added_shown_changed_and_deleted(server, clip):
    async def voices(*arguments):
        done = await run("voices", *arguments, "--json", url=server.url)
        assert done.status == 0, done.err
        return done.json

    options = ["--consent", "signed", "--language", "en", "--label", "team:news"]
    added = await voices("add", "Keeper", clip, *options, "--wait")
    [told] = added["voices"]
    assert (told["outcome"], told["cache_status"]) == ("added", "ready")
    shown = await voices("show", "keeper")
    assert shown["cache_status"] == "ready"
    assert shown["voice"]["labels"] == {"team": "news"}
    listed = await voices("ls", "--label", "team:news")
    assert [voice["id"] for voice in listed["voices"]] == [told["id"]]

    changes = ["--name", "Other", "--label", "Team:sport", "--clear", "language"]
    changed = await voices("edit", "keeper", *changes)
    assert changed["voice"]["labels"] == {"Team": "sport"}
    assert "language" not in changed["voice"]
    unlabelled = await voices("edit", "other", "--unlabel", "team")
    assert unlabelled["voice"]["labels"] == {}

    assert (await voices("rm", "other"))["counts"] == {"deleted": 1}
    assert (await voices("ls"))["voices"] == []
    assert server.service.store.verify() == []


async def test_texts_for_people_go_to_a_pipe_without_colours(server, clip):
    await server.register("ann", clip.read_bytes(), labels='{"team": "news"}')
    listed = await run("voices", "ls", url=server.url)
    assert [line.split()[0] for line in listed.out.splitlines()] == ["NAME", "ann"]
    assert "team:news" in listed.out
    shown = await run("voices", "show", "ann", url=server.url)
    assert "cache_status" in shown.out
    for done in (listed, shown):
        assert "\x1b" not in done.out + done.err


async def test_the_same_clip_and_texts_are_not_sent_again(server, clip, tmp_path):
    arguments = ["voices", "add", "ann", "--consent", "signed", "--json"]
    await run(*arguments, clip, url=server.url)
    posts = server.gate.num_posts
    (tmp_path / "first.wav").write_bytes(clip.read_bytes())
    again = await run(*arguments, tmp_path / "first.wav", url=server.url)
    assert again.json["counts"] == {"unchanged": 1}
    assert server.gate.num_posts == posts


async def test_a_voice_that_has_lost_its_audio_is_brought_back(server, clip, tmp_path):
    add = "add", "ann", clip, "--consent", "signed"
    store = server.service.store
    await run("voices", *add, "--wait", url=server.url)
    await run("voices", "export", "ann", "--out", tmp_path, url=server.url)
    record = store.find("ann").record
    path = Path(store.files.file_name(record.audio_sha256, AUDIO))
    for again in (add, ("import", tmp_path / "ann.voice")):
        path.write_bytes(b"what is left of it")
        with pytest.raises(SourceCorruptError):
            store.read_audio(record.audio_sha256)
        shown = await run("voices", "show", "ann", "--json", url=server.url)
        assert shown.json["voice"]["audio_lost"] is True
        done = await run("voices", *again, url=server.url)
        assert (done.status, "unchanged" in done.out) == (0, False), done.out + done.err
        shown = await run("voices", "show", "ann", "--json", url=server.url)
        assert "audio_lost" not in shown.json["voice"]
        assert shown.json["voice"]["id"] == record.speaker_id
        assert store.read_audio(record.audio_sha256) is not None
    assert store.verify() == []


async def test_several_clips_are_added_as_one_voice(tiny, tmp_path, monkeypatch):
    """By their files and transcripts, and by a manifest that says the same."""
    for seed in range(2):
        (tmp_path / f"{seed}.wav").write_bytes(clip_bytes(seed))
    clips = [tmp_path / "0.wav", tmp_path / "1.wav"]
    words = ["--ref-text", "one", "--ref-text", "two"]
    rows = [("ann", "0.wav; 1.wav", "signed", "one\ntwo")]
    columns = ("name", "audio", "consent", "ref_text")
    manifest = write_manifest(tmp_path / "m.csv", rows, columns)
    directory = tmp_path / "speakers"
    fish = Served(tiny(FISH), directory, monkeypatch, family=FISH)
    add = ("voices", "add", "--json")
    async with serving(fish) as server:
        named = (*add, "ann", *clips, "--consent", "signed")
        refused = await run(*named, *words[:2], url=server.url)
        assert refused.status == 2
        assert "1 line, and the voice 2 clips" in refused.json["problems"][0]["error"]
        done = await run(*named, *words, url=server.url)
        assert done.json["counts"] == {"added": 1}, done.err
        shown = (await run("voices", "show", "ann", "--json", url=server.url)).json
        assert len(shown["voice"]["clips"]) == 2
        assert shown["voice"]["ref_text"] == "one\ntwo"
        again = await run(*add, "--manifest", manifest, url=server.url)
        assert again.json["counts"] == {"unchanged": 1}
        one = await run(*add, "ann", clips[0], "--consent", "signed", url=server.url)
        assert "another ref_text and audio" in one.json["voices"][0]["error"]


async def test_what_differs_is_replaced_only_if_that_is_asked(server, clip, tmp_path):
    arguments = ["voices", "add", "ann", "--consent", "signed", "--json"]
    first = await run(*arguments, clip, url=server.url)
    other = tmp_path / "other.wav"
    other.write_bytes(clip_bytes(1))
    texts = ["--description", "warm"]
    refused = await run(*arguments, other, *texts, url=server.url)
    assert refused.status == 1
    assert "speaker_description and audio" in refused.json["voices"][0]["error"]
    replaced = await run(*arguments, other, *texts, "--replace", url=server.url)
    assert replaced.json["counts"] == {"replaced": 1}
    assert replaced.json["voices"][0]["id"] == first.json["voices"][0]["id"]


NUM_MANY = 50


async def test_many_are_interrupted_and_the_rest_added_in_a_new_run(server, tmp_path):
    manifest = write_many(tmp_path, NUM_MANY)
    arguments = ["voices", "add", "--manifest", manifest, "--json"]
    process = await begun(*arguments, url=server.url)
    await soon(lambda: server.service.store.num_speakers() >= 20, 60)
    server.gate.is_open.clear()  # or all are there before it is interrupted
    process.send_signal(signal.SIGINT)
    await asyncio.sleep(1.0)  # those that it has begun are sent, and wait here
    server.gate.is_open.set()
    cut = await ended(process)
    assert cut.status == 130, cut.err
    assert "Run the same command again" in cut.err
    there = server.service.store.num_speakers()
    assert 20 <= there < NUM_MANY
    assert cut.json["interrupted"]
    # What was on its way was waited for: it is known what became of all.
    assert cut.json["counts"] == {"added": there, "not_tried": NUM_MANY - there}

    posts = server.gate.num_posts
    server.gate.queries.clear()
    done = await run(*arguments, "--wait", url=server.url)
    assert server.gate.queries.count("urgent=false") == NUM_MANY
    assert done.status == 0, done.err
    assert done.json["counts"] == {"unchanged": there, "added": NUM_MANY - there}
    # Those that were not there, and each is waited for.
    assert server.gate.num_posts - posts == NUM_MANY - there + NUM_MANY
    assert {each["cache_status"] for each in done.json["voices"]} == {"ready"}
    names = [each["name"] for each in done.json["voices"]]
    assert names == [f"voice {number:03}" for number in range(NUM_MANY)]
    await server.settled()
    assert server.service.store.num_speakers() == NUM_MANY
    assert server.service.store.verify() == []


async def test_what_fails_is_said_and_the_rest_is_added(server, tmp_path, clip):
    (tmp_path / "text.wav").write_text("this is no clip")
    await server.register("taken", clip_bytes(9))
    rows = [
        ("ann", "clip.wav", "signed"),
        ("bob", "text.wav", "signed"),
        ("taken", "clip.wav", "signed"),
    ]
    manifest = write_manifest(tmp_path / "voices.csv", rows)
    done = await run("voices", "add", "--manifest", manifest, url=server.url)
    assert done.status == 1
    summary, *failures = done.out.splitlines()
    assert summary == "1 added, 2 failed"
    assert failures[0].startswith("  row 3, bob: The reference audio cannot be used")
    assert failures[1].startswith("  row 4, taken: is registered with another consent")


async def test_nothing_is_sent_of_a_manifest_with_a_mistake(server, tmp_path, clip):
    rows = [("ann", "clip.wav", "signed"), ("bob", "clip.wav", "")]
    manifest = write_manifest(tmp_path / "voices.csv", rows)
    arguments = ["voices", "add", "--manifest", manifest, "--json"]
    done = await run(*arguments, url=server.url)
    assert done.status == 2
    [problem] = done.json["problems"]
    assert problem["row"] == 3
    assert "consent" in problem["error"]
    assert server.gate.num_posts == 0
    given = await run(*arguments, "--consent", "all signed", url=server.url)
    assert given.json["counts"] == {"added": 2}


async def test_all_voices_are_encoded_before_warm_ends(server):
    for number in range(3):
        await server.register(f"voice {number}", clip_bytes(number))
    assert sum(server.encodes.values()) == 0
    server.gate.queries.clear()
    done = await run("voices", "warm", "--all", "--json", url=server.url)
    assert server.gate.queries == ["urgent=false"] * 3
    assert done.json["counts"] == {"ready": 3}
    made = server.encodes
    assert sum(made.values()) == 3  # one encoder is enough without a transcript
    again = await run("voices", "warm", "voice 1", url=server.url)
    assert (again.status, again.out) == (0, "1 ready\n")
    assert server.gate.queries[3:] == [""]
    assert server.encodes == made


async def test_voices_that_are_long_in_line_are_waited_for(server, monkeypatch):
    """None is given up, whatever the server has had them wait for."""
    monkeypatch.setattr(ensure, "IN_TURN_SECONDS", 0.05)
    for number in range(3):
        await server.register(f"voice {number}", clip_bytes(number))
    server.encoders[0].gate.clear()
    warm = ["voices", "warm", "--all", "--json"]
    warming = asyncio.create_task(run(*warm, url=server.url))
    await soon(lambda: server.gate.num_posts > 3 + 2 * 3)
    server.encoders[0].gate.set()
    assert (await warming).json["counts"] == {"ready": 3}
    assert sum(server.encodes.values()) == 3
    server.encoders[0].gate.clear()
    process = await begun(*warm, "--force", url=server.url)
    posts = server.gate.num_posts
    await soon(lambda: server.gate.num_posts > posts + 3)
    process.send_signal(signal.SIGINT)
    cut = await asyncio.wait_for(ended(process), 60)
    assert (cut.status, cut.json["counts"]) == (130, {"not_tried": 3})
    server.encoders[0].gate.set()


async def test_a_voice_that_is_renamed_meanwhile_is_encoded_all_the_same(server):
    await server.register("ann", clip_bytes())
    server.gate.is_open.clear()
    warm = run("voices", "warm", "--all", "--json", url=server.url)
    warming = asyncio.create_task(warm)
    await soon(lambda: server.gate.num_posts)
    renamed = {"name": "bea"}
    assert (await server.client.patch("/v1/audio/voices/ann", json=renamed)).is_success
    server.gate.is_open.set()
    done = await warming
    assert done.json["voices"] == [{"name": "ann", "outcome": "ready"}], done.err


async def test_voices_whose_names_make_one_file_have_a_file_each(server, tmp_path):
    long = 70 * "\u6f6e"  # a file's name holds 66 of these
    names = ["alone", "a", ".a", f"{long} 1", f"{long} 2", "b_c", "b\u00a0c"]
    for name in names:
        assert (await server.register(name, clip_bytes())).status_code == 200
    listed = await run("voices", "ls", "--json", url=server.url)
    ids = {voice["name"]: voice["id"] for voice in listed.json["voices"]}
    # What the file of another is called, once it has its id in it.
    names.append(f"a-{ids['a']}")
    await server.register(names[-1], clip_bytes())
    options = ["--out", tmp_path, "--force", "--json"]
    for which in (["--all"], names):
        saved = await run("voices", "export", *which, *options, url=server.url)
        files = {each["name"]: each["file"] for each in saved.json["voices"]}
        assert len({file.casefold() for file in files.values()}) == len(names)
        assert files["alone"] == str(tmp_path / "alone.voice")
        for name, file in files.items():
            bundle = bundle_format.read(Path(file).read_bytes(), b"")
            assert bundle.voice.name == name


async def test_trying_writes_what_plays_and_says_hit_or_miss(server, tmp_path, clip):
    await server.register("ann", clip.read_bytes(), ref_text="It is said so.")
    out = tmp_path / "out.wav"
    arguments = ["voices", "try", "ann", "Hello.", "--model", "m", "--json"]
    first = await run(*arguments, "-o", out, url=server.url)
    assert first.status == 0, first.err
    assert first.json["cache"] == "miss"
    with wave.open(str(out)) as file:
        assert file.getnframes() == 4_800  # what the test's engine speaks
    refused = await run(*arguments, "--out", "-", url=server.url)
    assert (refused.status, refused.out) == (2, "")
    assert "--json" in refused.err
    second = await run(*arguments[:-1], "--out", "-", url=server.url)
    assert second.out.startswith("RIFF")
    assert "cache: hit" in second.err


async def test_what_cannot_be_exported_fails_and_replaces_no_file(server, tmp_path):
    await server.register("ann", clip_bytes())
    options = ["voices", "export", "ann", "nobody", "--out", tmp_path]
    saved = await run(*options, url=server.url)
    assert saved.status == 1
    assert saved.out.startswith("1 exported, 1 failed\n  nobody: ")
    await run("voices", "edit", "ann", "--description", "warm", url=server.url)
    again = await run(*options, url=server.url)
    assert again.status == 1 and "--force replaces it" in again.out
    (tmp_path / "ann.voice").unlink()
    os.mkfifo(tmp_path / "ann.voice")
    refused = await run(*options, "--force", url=server.url)
    assert refused.status == 1 and "no regular file" in refused.out
    assert (tmp_path / "ann.voice").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ann.voice", "speakers"]


async def test_one_voice_that_is_refused_keeps_no_other_out(server, tmp_path):
    await server.register("ann", clip_bytes())
    bundle = (await server.client.get("/v1/audio/voices/ann/bundle")).content
    await server.client.delete("/v1/audio/voices/ann")
    files = [tmp_path / name for name in ("text.voice", "ann.voice", "cut.voice")]
    for path, data in zip(files, (b"no bundle", bundle, bundle[:-30]), strict=True):
        path.write_bytes(data)
    files.append(tmp_path / "gone.voice")
    done = await run("voices", "import", *files, "--json", url=server.url)
    assert done.status == 1
    outcomes = [(each["name"], each["outcome"]) for each in done.json["files"]]
    expected = ["failed", "imported", "failed", "failed"]
    assert outcomes == list(zip(map(str, files), expected, strict=True))
    as_bob = "--name", "bob"
    assert (await run("voices", "import", *files, *as_bob, url=server.url)).status == 2
    await run("voices", "import", files[1], *as_bob, url=server.url)
    assert server.service.store.names(Page(limit=9)) == ["ann", "bob"]


async def test_a_write_whose_answer_is_lost_is_done_once(server, clip, tmp_path):
    async def voices(*arguments):
        server.gate.num_lost = 1
        done = await run("voices", *arguments, "--json", url=server.url)
        assert (done.status, server.gate.num_lost) == (0, 0), done.err
        return done.json

    consent = "--consent", "signed"
    [added] = (await voices("add", "keeper", clip, *consent))["voices"]
    record = server.service.store.find("keeper").record
    assert (added["outcome"], added["id"]) == ("added", record.speaker_id)
    assert "verdict" in added["quality"] and record.generation == 1
    bundle = await server.client.get("/v1/audio/voices/keeper/bundle")
    (file := tmp_path / "keeper.voice").write_bytes(bundle.content)
    await run("voices", "edit", "keeper", "--description", "warm", url=server.url)
    done = await voices("import", file, "--on-conflict", "rename")
    [imported] = done["files"][0]["imported"]
    assert imported["voice"]["name"] == "keeper (2)"
    assert server.service.store.names(Page(limit=9)) == ["keeper", "keeper (2)"]
    [removed] = (await voices("rm", "keeper"))["voices"]
    assert removed["outcome"] == "deleted"
    again = await run("voices", "rm", "keeper", "--json", url=server.url)
    assert (again.status, again.json["voices"][0]["outcome"]) == (4, "missing")
    assert server.service.store.names(Page(limit=9)) == ["keeper (2)"]


async def test_a_clip_is_judged_before_and_when_it_is_added(server, clip, tmp_path):
    """Before as well without a server."""
    (tmp_path / "text.wav").write_text("this is no clip")
    which = ["voices", "check", clip, tmp_path / "text.wav", "--json"]
    judged = await run(*which, url=server.url)
    found, refused = judged.json["clips"]
    assert (judged.status, refused["outcome"]) == (1, "failed")
    assert "cannot be used" in judged.out
    here = await run(*which, "--offline", url=GONE)
    assert (here.status, here.json["clips"][0]) == (1, found)
    assert here.json["clips"][1]["outcome"] == "failed"
    assert found["outcome"] in ("good", "fair", "poor")
    assert found["duration_seconds"] == pytest.approx(1.0, abs=0.01)
    add = "add", "ann", clip, "--consent", "signed", "--json"
    added = await run("voices", *add, url=server.url)
    assert added.json["voices"][0]["quality"]["verdict"] == found["outcome"]


async def test_an_unknown_voice_is_status_4_and_a_silent_server_3(server):
    for command, *options in (["show"], ["edit", "--language", "de"], ["rm"]):
        done = await run("voices", command, "nobody", *options, url=server.url)
        assert done.status == 4, (command, done)
    forgiven = await run("voices", "rm", "nobody", "--missing-ok", url=server.url)
    assert forgiven.status == 0
    gone = await run("voices", "ls", url=GONE)
    assert gone.status == 3
    assert "--url" in gone.err
    assert gone.out == ""


@pytest.mark.parametrize(
    ("variable", "sent"), (("VLLM_API_KEY", b"Bearer secret"), ("OPENAI_API_KEY", None))
)
async def test_only_the_environments_own_url_and_key_are_used(server, variable, sent):
    environ = {"SPEAKER_URL": f"{server.url}/v1/", variable: "secret"}
    done = await ended(await begun("voices", "ls", **environ))
    assert (done.status, done.out, done.err) == (0, "", "no voices\n")
    assert server.gate.keys == {sent}


async def test_a_directory_is_written_only_without_its_server(server, clip, tmp_path):
    await server.register("ann", clip.read_bytes(), labels='{"team": "news"}')
    where = ["--directory", tmp_path / "speakers"]
    listed = await run("voices", "ls", *where, "--label", "team:news", "--json")
    over_http = await run("voices", "ls", "--json", url=server.url)
    assert listed.json == over_http.json
    mine = await run("voices", "ls", *where, "--tenant", "default", "--json")
    assert mine.json == listed.json
    none = await run("voices", "ls", *where, "--tenant", "acme", "--json")
    assert none.status == 2 and "of default there are" in none.err
    found = await run("voices", "show", "ann", *where, "--tenant", "acme")
    assert found.status == 4, found.err
    out = ["--out", tmp_path / "out"]
    found = await run("voices", "export", "ann", *where, "--tenant", "acme", *out)
    assert found.status == 1 and "not registered" in found.out
    keyed = await run("voices", "ls", "--tenant", "acme", url=server.url)
    assert keyed.status == 2 and "--api-key" in keyed.err
    refused = await run("voices", "rm", "ann", *where)
    assert refused.status == 2
    assert "is in use" in refused.err
    tidy = await run("gc", *where)
    assert tidy.status == 2
    assert (await server.client.get("/v1/audio/voices/ann")).status_code == 200


async def test_a_stopped_servers_voices_are_restored_from_a_file(
    default_checkpoint, tmp_path, monkeypatch
):
    directory = tmp_path / "speakers"
    saved, where = tmp_path / "saved", ["--directory", directory, "--json"]
    files = [saved / f"voice {number}.voice" for number in range(2)]
    monkeypatch.setenv("SPEAKER_MAX_UPLOADED", "0")
    async with serving(Served(default_checkpoint, directory, monkeypatch)) as server:
        for number in range(2):
            await server.register(f"voice {number}", clip_bytes(number))
        await run("voices", "warm", "--all", url=server.url)
        await run("voices", "export", "--all", "--out", saved, url=server.url)
        refused = await run("voices", "import", *files, *where)
        assert refused.status == 2 and "is in use" in refused.err
    shown = (await run("voices", "show", "voice 0", *where)).json["voice"]
    mine = "voices", "rm", "--yes", "voice 0", *where
    assert (await run(*mine, "--tenant", "acme")).status == 4
    assert (await run(*mine)).status == 0
    assert not list(directory.rglob(f"{shown['audio_sha256']}*"))
    assert (await run("voices", "show", "voice 0", *where)).status == 4
    back = await run("voices", "import", *files, *where)
    assert back.json["counts"] == {"imported": 1, "unchanged": 1}, back.err
    # Another clip in its place: what it replaces is gone from the disk.
    other = ["--name", "voice 1", "--on-conflict", "replace"]
    one, two = files
    replaced = await run("voices", "import", one, *other, *where)
    assert replaced.status == 0, replaced.err
    sha = bundle_format.read(two.read_bytes(), b"")
    assert not list(directory.rglob(f"{sha.voice.audio_sha256}*"))
    theirs = ["--tenant", "acme"]
    assert (await run("voices", "import", one, *theirs, *where)).status == 0
    listed = await run("voices", "ls", *theirs, *where)
    assert [voice["name"] for voice in listed.json["voices"]] == ["voice 0"]
    with monkeypatch.context() as strict:
        strict.setenv("SPEAKER_CONSENT", "recording")
        refused = await run("voices", "import", one, "--name", "third", *where)
    assert refused.json["counts"] == {"failed": 1}
    store = open_existing(load_settings())
    assert store.verify() == []
    store.close()
    async with serving(Served(default_checkpoint, directory, monkeypatch)) as server:
        assert (await run("voices", "warm", "--all", url=server.url)).status == 0
        assert sum(server.encodes.values()) == 0, "encodings came with the file"
