"""A registered voice is the same by a WebSocket."""

import json

import pytest
from websockets.sync.client import connect

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_websocket_stream_speaks_with_a_registered_voice(
    client, shared_server, make_clip
):
    client.register("socket", make_clip(), ref_text="Hello there.")
    expected = client.speak("Hello world.", voice="socket").audio
    config = {"voice": "socket", "response_format": "pcm", "stream_audio": True}
    url = shared_server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    heard = bytearray()
    with connect(url) as socket:
        for message in (
            {"type": "session.config", "seed": 7, **config},
            {"type": "input.text", "text": "Hello world."},
            {"type": "input.done"},
        ):
            socket.send(json.dumps(message))
        while isinstance(said := socket.recv(timeout=60), bytes) or (
            json.loads(said)["type"] != "session.done"
        ):
            heard += said if isinstance(said, bytes) else b""
    assert bytes(heard) == expected
