"""Two tenants on a real server: each hears its own voice, and nobody else any."""

import json

import pytest

from tests.served import Servers
from vllm_tts_cache.testing.server import SpeechClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]

KEYS = {"acme": "acme-key-0123456789", "zenith": "zenith-key-0123456789"}
ADMIN_KEY = "admin-key-0123456789"
VOICES = "/v1/audio/voices"


@pytest.fixture
def servers(family, checkpoint, tmp_path):
    own = Servers(family, checkpoint, tmp_path)
    yield own
    own.stop()
    assert own.problems() == []


def client_of(server, key):
    client = SpeechClient(server.url)
    client.http.headers["Authorization"] = f"Bearer {key}"
    return client


def test_each_tenant_speaks_with_its_own_voice_of_a_name(servers, tmp_path, make_clip):
    path = tmp_path / "tenants.json"
    tenants = [{"name": name, "keys": [key]} for name, key in KEYS.items()]
    path.write_text(json.dumps({"tenants": tenants, "admin_keys": [ADMIN_KEY]}))
    path.chmod(0o600)
    server, stranger = servers.start(SPEAKER_TENANTS_FILE=path)
    assert stranger.speak(voice="Ann").status == 401
    assert stranger.http.get(VOICES).status_code == 401
    clients = [client_of(server, key) for key in KEYS.values()]
    for client in clients:
        done = client.register("Ann", make_clip(), ref_text="Hello there.")
        assert done.status_code == 200, done.text
    heard = [client.speak(voice="Ann") for client in clients]
    assert [(each.status, each.cache) for each in heard] == [(200, "miss")] * 2
    assert heard[0].audio != heard[1].audio
    gone = clients[0].http.delete(f"{VOICES}/Ann")
    assert gone.status_code == 200, gone.text
    again = clients[1].speak(voice="Ann")
    assert (again.cache, again.audio) == ("hit", heard[1].audio)
    admin = client_of(server, ADMIN_KEY)
    told = admin.stats()["tenants"]
    counts = {name: each["registry"]["speakers"] for name, each in told.items()}
    assert counts == {"acme": 0, "zenith": 1}
    for each in (*clients, admin):
        each.close()
