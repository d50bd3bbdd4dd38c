"""What README and the first pages have one paste, pasted beside a real server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tts_cache.testing.clips import SPEECH

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ADDRESS = "http://localhost:8091"
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
CLIENTS = ROOT / "docs" / "guides" / "clients.md"


def blocks_of(page, kind):
    """Those that ask a server."""
    found = re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)
    return [block for block in found if "curl" in block or "OpenAI(" in block]


@pytest.fixture
def paste(shared_server, client, tmp_path):
    """Run a page's blocks one behind the other, in a checkout that has nothing else."""
    (tmp_path / "vllm_tts_cache").symlink_to(ROOT / "vllm_tts_cache")
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\n")

    def run(page, kind, *command):
        blocks = blocks_of(page, kind)
        assert blocks
        text = "\n".join(blocks)
        assert ADDRESS in text
        done = subprocess.run(
            [*command, text.replace(ADDRESS, shared_server.url)],
            cwd=tmp_path,
            env={**os.environ, "CURL_HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield run
    client.http.delete("/v1/audio/voices/keeper")


SHELL = ("bash", "-euo", "pipefail", "-c")


def test_the_commands_of_the_readme_register_speak_and_delete(paste, tmp_path, client):
    said = paste(README, "sh", *SHELL)
    assert "x-speaker-cache: hit" in said.lower()
    assert (tmp_path / "out.wav").read_bytes().startswith(b"RIFF")
    assert client.http.get("/v1/audio/voices/keeper").status_code == 404


def test_the_first_ten_minutes_register_the_words_and_speak(paste, tmp_path, client):
    said = paste(INDEX, "sh", *SHELL)
    assert "x-speaker-cache: hit" in said.lower()
    assert (tmp_path / "out.wav").read_bytes().startswith(b"RIFF")
    shown = client.http.get("/v1/audio/voices/keeper").json()
    assert shown["voice"]["ref_text"] == SPEECH.transcript
    assert shown["cache_status"] == "ready"


def test_examples_of_the_client_guide_speak_whole_or_in_pieces(paste, tmp_path, client):
    client.register("keeper", SPEECH.path, ref_text=SPEECH.transcript)
    said = paste(CLIENTS, "sh", *SHELL)
    assert said.count("event: speech.audio.delta") > 1
    assert said.count("event: speech.audio.done") == 1
    assert (tmp_path / "out.wav").read_bytes().startswith(b"RIFF")
    assert (tmp_path / "out.mp3").read_bytes()[:1] in (b"\xff", b"I")
    assert (tmp_path / "out.pcm").stat().st_size > 10_000
    paste(CLIENTS, "python", sys.executable, "-c")
    assert (tmp_path / "hello.mp3").read_bytes()[:1] in (b"\xff", b"I")
    assert (tmp_path / "hello.pcm").stat().st_size > 10_000


STREAMS = (
    # stream_format, stream, format -> media type, comes in pieces
    (None, None, None, "audio/wav", False),
    (None, False, "mp3", "audio/mpeg", False),
    (None, None, "opus", "audio/ogg", False),
    (None, None, "flac", "audio/flac", False),
    (None, None, "pcm", "audio/pcm", False),
    (None, None, "aac", "audio/aac", False),
    ("audio", None, None, "audio/wav", True),
    ("audio", False, "pcm", "audio/pcm", True),
    ("audio", True, "pcm", "audio/pcm", True),
    ("audio", None, "mp3", "audio/mpeg", True),
    ("sse", None, None, "text/event-stream", True),
    ("sse", False, "pcm", "text/event-stream", True),
    (None, True, None, "text/event-stream", True),
    (None, True, "flac", "text/event-stream", True),
)


@pytest.mark.parametrize(("way", "stream", "form", "kind", "in_pieces"), STREAMS)
def test_each_way_to_stream_answers_as_it_is_documented(
    client, make_clip, way, stream, form, kind, in_pieces
):
    client.register("streams", make_clip(pitch_hz=431), ref_text="Hello there.")
    given = {"stream_format": way, "stream": stream, "response_format": form}
    body = {key: value for key, value in given.items() if value is not None}
    text = "The keeper counts the ships at dusk, and writes each name."
    said = {"input": text, "voice": "streams", "seed": 7, **body}
    with client.http.stream("POST", "/v1/audio/speech", json=said) as answer:
        answer.read()
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == kind
    assert ("content-length" in answer.headers) is not in_pieces


def test_a_stream_of_another_speed_is_refused(client, make_clip):
    client.register("streams", make_clip(pitch_hz=431), ref_text="Hello there.")
    body = {"input": "Hello.", "voice": "streams", "speed": 1.5}
    for way, status in (({}, 200), ({"stream_format": "audio"}, 400)):
        answer = client.http.post("/v1/audio/speech", json={**body, **way})
        assert answer.status_code == status
