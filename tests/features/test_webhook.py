"""What a webhook is told of voices."""

import asyncio
import hashlib
import hmac
import json
from base64 import b64encode
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI, Request, Response

from tests import store_samples
from tests.features.test_names import add
from tests.speaking import registered, wav
from tests.speech_server import Server, listening
from tests.waiting import soon
from vllm_tts_cache.catalogue import voice_news
from vllm_tts_cache.catalogue.records import Identity
from vllm_tts_cache.entrypoints.features import webhook
from vllm_tts_cache.errors import ConfigError, StorageError
from vllm_tts_cache.logs import ThrottledLog

SECRET = "a-secret-of-the-receiver"
VOICES = "/v1/audio/voices"


@dataclass
class Receiver:
    """A server that is told: message ids and messages, and what it answers."""

    url: str = ""
    got: list = field(default_factory=list)
    statuses: list = field(default_factory=list)
    ids: list = field(default_factory=list)
    num_elsewhere: int = 0

    @property
    def told(self):
        return [(m["type"], m["data"].get("name")) for _, m in self.got]

    async def take(self, request: Request):
        body, headers = await request.body(), request.headers
        head = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode()
        digest = hmac.new(SECRET.encode(), head + body, hashlib.sha256).digest()
        assert headers["webhook-signature"] == f"v1,{b64encode(digest).decode()}"
        self.ids.append(headers["webhook-id"])
        status = self.statuses.pop(0) if self.statuses else 204
        if status < 300:
            self.got.append((headers["webhook-id"], json.loads(body)))
        return Response(status_code=status, headers={"Location": "/elsewhere"})

    async def elsewhere(self):
        self.num_elsewhere += 1


@asynccontextmanager
async def receiving():
    receiver, app = Receiver(), FastAPI()
    app.post("/told")(receiver.take)
    app.api_route("/elsewhere", methods=["GET", "POST"])(receiver.elsewhere)
    async with listening(app) as port:
        receiver.url = f"http://127.0.0.1:{port}/told"
        yield receiver


@pytest.fixture
async def receiver(monkeypatch):
    monkeypatch.setattr(webhook, "throttled", ThrottledLog())
    monkeypatch.setattr(webhook, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(webhook, "FIRST_RETRY_SECONDS", 0.05)
    async with receiving() as made:
        monkeypatch.setenv("SPEAKER_WEBHOOK_URL", made.url)
        monkeypatch.setenv("SPEAKER_WEBHOOK_SECRET", SECRET)
        monkeypatch.setenv("SPEAKER_WEBHOOK_NETWORKS", "127.0.0.0/8")
        yield made


def test_messages_are_signed_as_the_standard_says():
    # Its own example.
    signed = webhook.signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_no base64", "whsec_%%%%"])
def test_a_secret_that_signs_nothing_is_refused(secret):
    with pytest.raises(ConfigError, match="SPEAKER_WEBHOOK_SECRET"):
        webhook.signature(secret, "", 0, b"")


async def test_a_voice_is_told_of_when_ready_replaced_and_deleted(receiver, server):
    await server.register("Early", wav(pitch_hz=150.0))
    await registered(server, "Ann", pitch_hz=120.0)
    await soon(lambda: ("voice.ready", "Ann") in receiver.told)
    await registered(server, "Ann", pitch_hz=130.0)
    await soon(lambda: receiver.told.count(("voice.ready", "Ann")) == 2)
    for name in ("Ann", "Early"):
        await server.client.delete(f"{VOICES}/{name}")
    await soon(lambda: receiver.told.count(("voice.deleted", None)) == 2)
    named = [m for m in receiver.got if m[1]["data"].get("name")]
    (first, ready), (second, again) = named
    assert first != second and ready["data"] == again["data"]
    assert set(ready["data"]) == {"id", "name"}
    gone = {m["data"]["id"] for _, m in receiver.got if m["type"] == "voice.deleted"}
    assert ready["data"]["id"] in gone and len(gone) == 2

    def left():
        with server.service.store.database.read() as db:
            return db.execute(voice_news.voice_news.select()).all()

    await soon(lambda: [row.speaker_id for row in left()] == [""])


async def test_what_a_receiver_refuses_is_told_again_by_the_same_id(receiver, server):
    receiver.statuses = [500, 302, 307, 404, 520, 530]
    await registered(server, "Ann", pitch_hz=120.0)
    await soon(lambda: receiver.told == [("voice.ready", "Ann")])
    await asyncio.sleep(0.3)
    assert receiver.told == [("voice.ready", "Ann")] and not receiver.statuses
    assert len(receiver.ids) == 7 and len(set(receiver.ids)) == 1
    assert receiver.num_elsewhere == 0


async def test_a_voice_that_cannot_be_encoded_is_told_with_the_reason(receiver, server):
    for encoder in server.encoders:
        encoder.errors.append(RuntimeError("no kernel"))
    await server.register("Ann", wav(pitch_hz=120.0), precompute="true")
    await soon(lambda: ("voice.failed", "Ann") in receiver.told)
    (failed,) = [m for _, m in receiver.got if m["type"] == "voice.failed"]
    assert failed["data"]["error"]


@pytest.fixture
def unlisted(receiver, monkeypatch):
    """The receiver's network is not one that the operator names."""
    monkeypatch.delenv("SPEAKER_WEBHOOK_NETWORKS")


async def test_a_private_address_is_not_told(receiver, unlisted, server, plugin_log):
    await registered(server, "Ann", pitch_hz=120.0)
    await soon(lambda: "SPEAKER_WEBHOOK_NETWORKS" in plugin_log.text)
    assert receiver.got == [] and receiver.url not in plugin_log.text


async def test_a_tenants_voice_is_told_with_its_tenant(receiver, host):
    await host.us.register("Ann", wav(pitch_hz=120.0), precompute="true")
    await soon(lambda: receiver.got)
    assert receiver.got[0][1]["data"]["tenant"] == "acme"


def writing(store):
    def write(change, *args):
        with store.database.write() as db:
            return change(db, *args)

    return write


@pytest.mark.every_backend
def test_news_are_rows_that_one_server_tells(open_here):
    store = open_here()
    write, old = writing(store), add(store, "Old", seed=0)
    for _ in range(2):
        write(voice_news.begin)
    assert write(voice_news.claim, 9) == []  # it was there before
    new, other = (add(store, name, seed=n) for n, name in ((1, "New"), (2, "Other")))
    assert write(voice_news.last_generation) == old.generation
    write(voice_news.adopt, old.generation)
    # Deleted between being ready and being told of it.
    hasty = add(store, "Hasty", seed=9)
    write(voice_news.adopt, other.generation)
    write(voice_news.settle, hasty.generation, "ready", None)
    store.remove_files(store.registrations.delete("Hasty"))
    assert write(voice_news.claim, 9) == []
    write(voice_news.note_gone)
    (gone,) = write(voice_news.claim, 9)
    assert (gone.state, gone.speaker_id) == ("deleted", hasty.speaker_id)
    write(voice_news.told, gone)
    write(voice_news.settle, new.generation, "ready", None)
    write(voice_news.settle, other.generation, "failed", "it hums")
    found = write(voice_news.claim, 9)
    expected = {("ready", "New", None), ("failed", "Other", "it hums")}
    assert {(n.state, n.name, n.reason) for n in found} == expected
    assert write(voice_news.claim, 9) == []  # it is another server's turn
    (ready,) = [n for n in found if n.state == "ready"]
    write(voice_news.failed, ready, -1.0)
    (again,) = write(voice_news.claim, 9)
    assert again == ready._replace(num_attempts=1)
    # Replaced while it was told: what is told of the old one does not count for it.
    replaced = add(store, "New", seed=3)
    write(voice_news.adopt, write(voice_news.last_generation))
    write(voice_news.settle, replaced.generation, "ready", None)
    write(voice_news.told, again)
    (newer,) = write(voice_news.claim, 9)
    assert newer.number == replaced.generation
    write(voice_news.failed, newer, 3600.0)  # which what comes later does not wait for
    # All are gone; one comes back, by a bundle, as another tenant's.
    for name in ("Old", "New", "Other"):
        store.remove_files(store.registrations.delete(name))
    assert write(voice_news.has_gone)
    write(voice_news.note_gone)
    ended = write(voice_news.claim, 9)
    assert other.speaker_id not in {n.speaker_id for n in ended}  # it is being told
    write(voice_news.failed, next(n for n in found if n != ready), 60.0)
    ended += write(voice_news.claim, 9)
    assert {(n.speaker_id, n.state, n.name) for n in ended} == {
        (r.speaker_id, "deleted", None) for r in (old, new, other)
    }
    whose = {"identity": Identity(new.speaker_id, new.created_at), "tenant": "zenith"}
    record = store_samples.register(store, "Back", 5, **whose).record
    assert record.speaker_id == new.speaker_id
    write(voice_news.adopt, write(voice_news.last_generation))
    for each in ended:
        write(voice_news.told, each)
    write(voice_news.settle, record.generation, "ready", None)
    (told,) = write(voice_news.claim, 9)
    assert (told.tenant, told.name) == ("zenith", "Back")
    write(voice_news.told, told)
    assert not write(voice_news.has_gone) and not write(voice_news.is_due)


@pytest.mark.every_backend
def test_only_voices_that_may_be_ready_or_failed_are_looked_at(open_here):
    store = open_here()
    write = writing(store)
    write(voice_news.begin)
    made = [store_samples.register(store, n, i) for i, n in enumerate("RBW")]
    ready, bad, _ = (each.record for each in made)
    write(voice_news.adopt, 0)

    def looked_at(after=0, limit=9, encoder="e"):
        needed = [store_samples.key(0, encoder).encoder_fingerprint]
        found, after = write(voice_news.unsettled, needed, after, limit)
        return [number for number, *_ in found], after

    assert looked_at() == ([], 0)
    assert store_samples.publish(store, 0)
    store.note_failed(store_samples.key(1), "it hums")
    assert looked_at() == ([ready.generation, bad.generation], 0)
    assert looked_at(limit=1) == ([ready.generation], ready.generation)
    assert looked_at(ready.generation) == ([bad.generation], 0)
    assert looked_at(encoder="another's") == ([], 0)
    assert write(voice_news.settle, ready.generation, "ready", None)
    assert not write(voice_news.settle, ready.generation, "failed", "too late")
    assert write(voice_news.settle, bad.generation, "failed", "it hums")
    assert not write(voice_news.settle, bad.generation, "failed", "it hums")
    assert looked_at() == ([], 0)
    store.note_failed(store_samples.key(1, "another's"), "of another model")
    assert store_samples.publish(store, 1)
    assert looked_at() == ([bad.generation], 0)


@pytest.mark.parametrize(
    ("url", "secret"),
    [("example.com/x", SECRET), ("ftp://a/b", SECRET), ("https://a/b", "")],
)
async def test_a_server_that_cannot_tell_does_not_start(
    default_checkpoint, tmp_path, monkeypatch, url, secret
):
    monkeypatch.setenv("SPEAKER_WEBHOOK_URL", url)
    monkeypatch.setenv("SPEAKER_WEBHOOK_SECRET", secret)
    with pytest.raises(ConfigError, match="SPEAKER_WEBHOOK"):
        Server(default_checkpoint, tmp_path / "speakers", monkeypatch).start()


def failing(function, failures):
    def fails(*args, **named):
        if failures:
            raise failures.pop()
        return function(*args, **named)

    return fails


async def test_a_look_that_fails_ends_nothing(receiver, server, monkeypatch):
    failures = [RuntimeError("a bug"), StorageError("down")]
    monkeypatch.setattr(voice_news, "has_new", failing(voice_news.has_new, failures))
    await registered(server, "Ann", pitch_hz=120.0)
    await soon(lambda: receiver.told == [("voice.ready", "Ann")] and not failures)


async def test_what_nobody_takes_is_given_up(receiver, server, monkeypatch, plugin_log):
    monkeypatch.setattr(webhook, "MAX_ATTEMPTS", 3)
    receiver.statuses = [500] * 9
    await registered(server, "Ann", pitch_hz=120.0)
    await soon(lambda: "not told any more" in plugin_log.text)
    await asyncio.sleep(0.3)
    assert len(receiver.ids) == 3 and "Ann" not in plugin_log.text


async def test_what_is_noted_late_is_not_told_twice(receiver, server, monkeypatch):
    monkeypatch.setattr(webhook, "_NOTE_AGAIN_SECONDS", (0.01, 0.01, 0))
    failures = [StorageError("busy"), StorageError("busy")]
    monkeypatch.setattr(voice_news, "told", failing(voice_news.told, failures))
    monkeypatch.setattr(voice_news, "CLAIM_SECONDS", 0.2)
    await registered(server, "Ann", pitch_hz=120.0)
    await soon(lambda: not failures)
    await asyncio.sleep(0.5)
    assert receiver.told == [("voice.ready", "Ann")]
