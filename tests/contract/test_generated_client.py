"""A client that others generate from our `/openapi.json` works, and is told the truth.

It checks what it sends and what it is answered against the document, and makes its
models of it.
"""

import io
import json
from contextlib import asynccontextmanager
from typing import Any

import aiopenapi3
import pytest

from tests.contract.test_speech import wav
from tests.speech_server import Server, listening, running

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
VOICE, CONSENT = f"{VOICES}/{{name}}", f"{CONSENTS}/{{consent_id}}"

pytestmark = pytest.mark.long


@pytest.fixture
async def server(default_checkpoint, tmp_path, monkeypatch):
    async with running(Server(default_checkpoint, tmp_path, monkeypatch)) as server:
        yield server


@asynccontextmanager
async def generated(server):
    """A client made of what the server says of itself."""
    document = (await server.client.get("/openapi.json")).json()
    # Where none is named it is the server's own: that much the generator must be told.
    document["servers"] = [{"url": "/"}]
    async with listening(server.app) as port:
        url = f"http://127.0.0.1:{port}/openapi.json"
        client: Any = aiopenapi3.OpenAPI.loads(url, json.dumps(document))
        yield lambda path, method: client._[path, method]


def clip():
    return ("clip.wav", io.BytesIO(wav()), "audio/wav")


def form(**fields):
    return list(fields.items())


async def test_it_registers_lists_gets_changes_and_deletes_a_voice(server):
    async with generated(server) as call:
        fields = {"name": "Ann", "consent": "signed", "labels": '{"team": "news"}'}
        done = await call(VOICES, "post")(data=form(**fields, audio_sample=clip()))
        assert done.success is True
        assert done.voice.labels.model_dump() == {"team": "news"}
        listed = await call(VOICES, "get")(parameters={"label": ["team:news"]})
        assert [voice.id for voice in listed.uploaded_voices] == [done.id]
        shown = await call(VOICE, "get")(parameters={"name": "ann"})
        assert shown.voice.name == "Ann"
        assert shown.cache_status in ("pending", "processing", "ready")
        changes = {"name": "Bea", "pinned": True}
        changed = await call(VOICE, "patch")(parameters={"name": done.id}, data=changes)
        assert (changed.voice.name, changed.voice.pinned) == ("Bea", True)
        ready = await call(f"{VOICE}/cache", "post")(parameters={"name": "Bea"})
        assert ready.cache_status == "ready"
        deleted = await call(VOICE, "delete")(parameters={"name": "Bea"})
        assert (deleted.id, deleted.deleted) == (done.id, True)
        again = await call(VOICES, "get")()
        assert again.uploaded_voices == []


async def test_it_is_told_what_is_wrong_in_the_documents_shape(server):
    async with generated(server) as call:
        with pytest.raises(aiopenapi3.errors.HTTPClientError) as raised:
            await call(VOICE, "get")(parameters={"name": "nobody"})
        assert raised.value.status_code == 404
        told: Any = raised.value.data
        assert "nobody" in told.error.message


async def test_it_keeps_consents_and_moves_voices_as_files(server):
    async with generated(server) as call:
        fields = {"name": "Ann's", "language": "de", "recording": clip()}
        kept = await call(CONSENTS, "post")(data=form(**fields))
        assert (await call(CONSENTS, "get")()).first_id == kept.id
        fields = {"name": "Ann", "consent": kept.id, "audio_sample": clip()}
        await call(VOICES, "post")(data=form(**fields))
        audio = await call(f"{VOICE}/audio", "get")(parameters={"name": "Ann"})
        assert audio.startswith(b"fLaC")
        bundle = await call(f"{VOICE}/bundle", "get")(parameters={"name": "Ann"})
        file = ("Ann.voice", io.BytesIO(bundle), "application/octet-stream")
        moved = await call(f"{VOICES}/import", "post")(
            data=form(bundle=file, name="Bea")
        )
        assert [each.voice.name for each in moved.imported] == ["Bea"]
        archive = await call("/v1/audio/voice_archive", "get")()
        assert archive.count(b".voice") == 2
        for name in ("Ann", "Bea"):
            await call(VOICE, "delete")(parameters={"name": name})
        gone = await call(CONSENT, "delete")(parameters={"consent_id": kept.id})
        assert gone.deleted is True


async def test_a_clips_verdict_has_the_documents_shape(server):
    async with generated(server) as call:
        found = await call(f"{VOICES}/check", "post")(data=form(audio_sample=clip()))
        assert found.verdict == "poor"
        assert {reason.code for reason in found.reasons} >= {"no_speech"}
