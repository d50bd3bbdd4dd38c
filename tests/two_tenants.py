"""A server with two tenants, and what each of them sends to it."""

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.speaking import wav
from tests.speech_server import Server, running
from tests.waiting import soon
from vllm_tts_cache.speaker.reference import SpeakerRef

AUDIO = "/v1/audio"
VOICES, CONSENTS = f"{AUDIO}/voices", f"{AUDIO}/voice_consents"
ADMIN_KEY, STRANGER = "admin-key-0123456789", "stranger-0123456789"


@dataclass
class Side:
    """A tenant: its key, and what it has registered."""

    tenant: str
    pitch_hz: float
    client: Any = None
    voice: dict[str, Any] = field(default_factory=dict)
    consent: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self):
        return f"{self.tenant}-key-0123456789"

    @property
    def words(self):
        return f"words of {self.tenant}"

    def clip(self, **kwargs):
        return wav(pitch_hz=self.pitch_hz, **kwargs)

    async def register(self, name, audio, **fields):
        form = {"name": name, "consent": "yes", "precompute": "false", **fields}
        file = {"audio_sample": ("clip.wav", audio, "audio/wav")}
        return await self.client.post(VOICES, data=form, files=file)

    async def speak(self, **fields):
        body = {"input": "Hello.", "model": "m", **fields}
        return await self.client.post(f"{AUDIO}/speech", json=body)

    async def names(self):
        listed = (await self.client.get(VOICES)).json()
        return [voice["name"] for voice in listed["uploaded_voices"]]


def file_of(*sides, **limits):
    tenants = [{"name": s.tenant, "keys": [s.key], **limits} for s in sides]
    return json.dumps({"tenants": tenants, "admin_keys": [ADMIN_KEY]})


@dataclass
class Host:
    """A server with two tenants, each with a voice Ann."""

    server: Server
    us: Side
    them: Side
    anyone: httpx.AsyncClient
    path: Any

    def client(self, key):
        return httpx.AsyncClient(
            transport=self.server.client._transport,
            base_url="http://server",
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )

    def spoken(self):
        """The audio of the last prompt."""
        engine = self.server.engine
        ref = SpeakerRef.from_info(engine._info(engine.prompts[-1]))
        assert ref is not None
        return ref.audio_sha256


@contextlib.asynccontextmanager
async def two_tenants(checkpoint, directory, monkeypatch, make: Any = Server, **limits):
    us, them = Side("acme", 120.0), Side("zenith", 210.0)
    path = directory / "tenants.json"
    path.write_text(file_of(us, them, **limits))
    monkeypatch.setenv("SPEAKER_TENANTS_FILE", str(path))
    made = make(checkpoint, directory / "speakers", monkeypatch)
    async with running(made) as server:
        host = Host(server, us, them, server.client, path)
        us.client, them.client = host.client(us.key), host.client(them.key)
        yield host
        await us.client.aclose()
        await them.client.aclose()
        await server.settled()
        store = server.service.store
        await soon(lambda: not store.unfinished_deletions())
        assert store.verify() == []
