"""The client against answers as they are documented, and as nobody should send them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_tts_cache.client import VoicesClient
from vllm_tts_cache.entrypoints.cli import main
from vllm_tts_cache.errors import (
    ConfigError,
    RouteMissingError,
    ServerAnswerError,
    ServerUnreachableError,
    SpeakerNotFoundError,
)

CHECK = {
    "verdict": "poor",
    "reasons": [{"code": "noise", "message": "It is noisy; record in a quiet room."}],
    "duration_seconds": 4.5,
    "snr_db": None,
}
IMPORTED = {"voice": {"name": "ann"}, "encodings_kept": 2, "encodings_left": 0}


class Web(ThreadingHTTPServer):
    """Answers what the test put under method and path."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: dict[tuple[str, str], tuple[int, dict[str, str], Any]] = {}
        self.sent: list[tuple[str, str, bytes]] = []


class Answers(BaseHTTPRequestHandler):
    def answer(self):
        assert isinstance(self.server, Web)
        length = int(self.headers.get("content-length") or 0)
        self.server.sent.append((self.command, self.path, self.rfile.read(length)))
        status, headers, body = self.server.answers.get(
            (self.command, self.path.partition("?")[0]),
            (404, {}, {"error": {"message": "Not Found"}}),
        )
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_PATCH = answer

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    with Web() as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.01,))
        thread.start()
        yield web
        web.shutdown()
        thread.join()


@pytest.fixture
def client(server):
    with VoicesClient(server.url) as client:
        yield client


def call(server, *arguments):
    return main([*map(str, arguments), "--url", server.url])


def test_pages_are_followed_to_the_end_or_the_limit(server, client):
    path = "/v1/audio/voices"
    pages = [
        {"uploaded_voices": [{"name": "a"}, {"name": "b"}], "next": "b"},
        {"uploaded_voices": [{"name": "c"}]},
    ]
    voices = client.voices(search="x", label=["k:v"])
    server.answers["GET", path] = (200, {}, pages[0])
    found = [next(voices), next(voices)]
    server.answers["GET", path] = (200, {}, pages[1])
    assert [each["name"] for each in (*found, *voices)] == ["a", "b", "c"]
    assert [sent for _, sent, _ in server.sent] == [
        f"{path}?sort=name&search=x&label=k%3Av",
        f"{path}?sort=name&search=x&label=k%3Av&after=b",
    ]
    server.answers["GET", path] = (200, {}, pages[0])
    assert [each["name"] for each in client.voices(limit=1)] == ["a"]
    with pytest.raises(ServerAnswerError, match="the same page again"):
        list(client.voices())


@pytest.mark.parametrize("name", ("a b", "a/b", "ü?#", "%2e", "..."))
def test_a_name_is_one_segment_of_the_path(server, client, name):
    with pytest.raises(ServerAnswerError):
        client.get(name)
    [(_, path, _)] = server.sent
    assert path.startswith("/v1/audio/voices/")
    assert path.count("/") == 4
    assert not set("?# ") & set(path)


@pytest.mark.parametrize("name", ("", ".", ".."))
def test_what_would_be_another_path_is_no_voice(server, client, name):
    for call_of in (client.get, client.delete, client.precompute):
        with pytest.raises(SpeakerNotFoundError):
            call_of(name)
    assert server.sent == []


def test_a_missing_voice_is_none_and_a_missing_route_is_not(server, client):
    path = "/v1/audio/voices/ann"
    missing = {"error": {"message": "Voice 'ann' is not registered."}}
    server.answers["GET", path] = (404, {}, missing)
    assert client.find("ann") is None
    for body in ({"error": {"message": "Not Found"}}, {"detail": "Not Found"}, b""):
        server.answers["GET", path] = (404, {}, body)
        with pytest.raises(RouteMissingError, match="vllm-tts-cache loaded"):
            client.find("ann")


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    (
        (503, {"Retry-After": "7"}, 7),
        (503, {"Retry-After": 400 * "9"}, 3600),
        (503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1),
        (503, {}, None),
        (429, {"Retry-After": "2"}, 2),
        (400, {"Retry-After": "2"}, None),
    ),
)
def test_only_what_says_so_is_worth_another_try(
    server, client, status, headers, seconds
):
    error = {"error": {"message": "Busy.\x1b[31m"}}
    server.answers["GET", "/v1/audio/voices/ann"] = (status, headers, error)
    with pytest.raises(ServerAnswerError) as raised:
        client.get("ann")
    assert raised.value.retry_after_seconds == seconds
    assert "\x1b" not in str(raised.value)


def test_an_answer_that_is_not_json_is_another_kind_of_server(server, client):
    for body in (b"<html>", b"[]", b"\xff"):
        server.answers["GET", "/v1/audio/voices/ann"] = (200, {}, body)
        with pytest.raises(ServerAnswerError, match="another kind of server"):
            client.get("ann")


@pytest.mark.parametrize(
    "url", ("", "here", "ftp://here", "http://", "//h", "http://h\x00")
)
def test_what_is_no_url_is_refused_before_anything_is_sent(url):
    with pytest.raises(ConfigError, match="--url"):
        VoicesClient(url)


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="--api-key") as refused:
        VoicesClient("http://127.0.0.1:9", "sëcret\n")
    assert "cret" not in str(refused.value)


def test_nobody_there_says_how_to_name_another(server):
    server.server_close()
    for url in ("http://127.0.0.1:9", "http://["):
        with (
            VoicesClient(url) as client,
            pytest.raises(ServerUnreachableError, match="SPEAKER_URL"),
        ):
            client.get("ann")


def test_a_poor_clip_is_status_1_and_says_what_to_do(server, tmp_path, capsys):
    server.answers["POST", "/v1/audio/voices/check"] = (200, {}, CHECK)
    clip = tmp_path / "a.wav"
    clip.write_bytes(b"clip")
    assert call(server, "voices", "check", clip, "--ref-text", "Hello.") == 1
    out = capsys.readouterr().out
    assert "poor (4.5 s)" in out
    assert "record in a quiet room" in out
    [(_, _, sent)] = server.sent
    assert b"Hello." in sent
    assert call(server, "voices", "check", clip, "--json") == 1
    [found] = json.loads(capsys.readouterr().out)["clips"]
    assert found["outcome"] == "poor"
    assert found["reasons"] == CHECK["reasons"]


def test_a_server_without_the_route_says_so_once(server, tmp_path, capsys):
    clips = [tmp_path / f"{number}.wav" for number in range(5)]
    for clip in clips:
        clip.write_bytes(b"clip")
    assert call(server, "voices", "check", *clips, "--jobs", "1") == 1
    error = capsys.readouterr().err
    assert error.count("knows no POST /v1/audio/voices/check") == 1
    assert len(server.sent) == 1


def test_an_exported_voice_is_a_whole_file_or_none(server, tmp_path, capsys):
    for name, answer in (("ann", (200, {}, b"bundle")), ("bob", (500, {}, {}))):
        server.answers["GET", f"/v1/audio/voices/{name}/bundle"] = answer
    out = tmp_path / "out"
    assert call(server, "voices", "export", "ann", "bob", "--out", out) == 1
    assert [(p.name, p.read_bytes()) for p in out.iterdir()] == [
        ("ann.voice", b"bundle")
    ]
    capsys.readouterr()
    # What is there stays, unless that is asked for.
    server.answers["GET", "/v1/audio/voices/ann/bundle"] = (200, {}, b"new")
    assert call(server, "voices", "export", "ann", "--out", out) == 1
    assert (out / "ann.voice").read_bytes() == b"bundle"
    assert call(server, "voices", "export", "ann", "--out", out, "--force") == 0
    assert (out / "ann.voice").read_bytes() == b"new"


def test_a_bundle_is_sent_with_what_to_do_about_a_taken_name(server, tmp_path, capsys):
    answer = (200, {}, {"imported": [IMPORTED]})
    server.answers["POST", "/v1/audio/voices/import"] = answer
    file = tmp_path / "ann.voice"
    file.write_bytes(b"the bundle")
    options = ["--on-conflict", "rename", "--name", "other"]
    assert call(server, "voices", "import", file, *options) == 0
    assert "ann (2 encodings taken, 0 made anew)" in capsys.readouterr().out
    [(_, _, sent)] = server.sent
    for part in (b"the bundle", b"rename", b"other"):
        assert part in sent
