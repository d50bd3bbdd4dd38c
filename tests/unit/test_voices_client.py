"""The client against answers as they are documented, and as nobody should send them."""

import json
import ssl

import pytest

from tests.web import serving, signed_itself
from vllm_tts_cache import errors
from vllm_tts_cache.client import VoicesClient
from vllm_tts_cache.entrypoints.cli import main

CHECK = {
    "verdict": "poor",
    "reasons": [{"code": "noise", "message": "It is noisy; record in a quiet room."}],
    "duration_seconds": 4.5,
    "snr_db": None,
}


@pytest.fixture
def server():
    with serving() as web:
        yield web


@pytest.fixture
def client(server):
    with VoicesClient(server.url) as client:
        yield client


@pytest.fixture
def certificate(tmp_path):
    return signed_itself(tmp_path, "-addext", "subjectAltName=IP:127.0.0.1")


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
    asked = f"{path}?sort=name&search=x&label=k%3Av"
    assert [sent for _, sent, _ in server.sent] == [asked, f"{asked}&after=b"]
    server.answers["GET", path] = (200, {}, pages[0])
    assert next(client.voices())["name"] == "a"
    with pytest.raises(errors.ServerAnswerError, match="the same page again"):
        list(client.voices())


@pytest.mark.parametrize("name", ("a b", "a/b", "ü?#", "%2e", "..."))
def test_a_name_is_one_segment_of_the_path(server, client, name):
    with pytest.raises(errors.ServerAnswerError):
        client.get(name)
    [(_, path, _)] = server.sent
    assert path.startswith("/v1/audio/voices/")
    assert path.count("/") == 4
    assert not set("?# ") & set(path)


@pytest.mark.parametrize("name", ("", ".", "..", "a\ud83d"))
def test_what_would_be_another_path_is_no_voice(server, client, name):
    for call_of in (client.get, client.delete, client.precompute):
        with pytest.raises(errors.SpeakerNotFoundError):
            call_of(name)
    assert server.sent == []


def test_a_missing_voice_is_none_and_a_missing_route_is_not(server, client):
    path = "/v1/audio/voices/ann"
    missing = {"error": {"message": "Voice 'ann' is not registered."}}
    server.answers["GET", path] = (404, {}, missing)
    assert client.find("ann") is None
    for body in ({"error": {"message": "Not Found"}}, {"detail": "Not Found"}, b""):
        server.answers["GET", path] = (404, {}, body)
        with pytest.raises(errors.RouteMissingError, match="vllm-tts-cache loaded"):
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
def test_what_says_so_is_worth_another_try(server, client, status, headers, seconds):
    error = {"error": {"message": "Busy.\x1b[31m"}}
    server.answers["GET", "/v1/audio/voices/ann"] = (status, headers, error)
    with pytest.raises(errors.ServerAnswerError) as raised:
        client.get("ann")
    assert raised.value.retry_after_seconds == seconds
    assert "\x1b" not in str(raised.value)


def test_an_answer_that_is_not_json_is_another_kind_of_server(server, client):
    for body in (b"<html>", b"[]", b"\xff"):
        server.answers["GET", "/v1/audio/voices/ann"] = (200, {}, body)
        with pytest.raises(errors.ServerAnswerError, match="another kind of server"):
            client.get("ann")


@pytest.mark.parametrize("status", (200, 500))
def test_an_answer_without_end_is_not_read_whole(server, client, status, monkeypatch):
    """It was read into memory, whatever its length."""
    monkeypatch.setattr(server, "handle_error", lambda *_: None)
    endless = status, {}, b" " * (66 << 20) + b"{}"
    for path, ask in (("", client.get), ("/bundle", client.bundle)):
        server.answers["GET", f"/v1/audio/voices/ann{path}"] = endless
        with pytest.raises(errors.ServerAnswerError, match="more than 65 MiB"):
            ask("ann")


@pytest.mark.parametrize(
    "url", ("", "here", "ftp://here", "http://", "//h", "http://h\x00", "http://a..b")
)
def test_what_is_no_url_is_refused_before_anything_is_sent(url):
    with pytest.raises(errors.ConfigError, match="--url"):
        VoicesClient(url)


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown():
    with pytest.raises(errors.ConfigError, match="--api-key") as refused:
        VoicesClient("http://127.0.0.1:9", "sëcret\n")
    assert "cret" not in str(refused.value)


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


def test_a_self_signed_certificate_is_named(server, certificate, capsys, monkeypatch):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setattr(server, "handle_error", lambda *_: None)
    server.url = server.url.replace("http", "https")
    server.answers["GET", "/v1/audio/voices"] = (200, {}, {"uploaded_voices": []})
    assert call(server, "voices", "ls") == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "its certificate is not trusted (self-signed certificate)" in said
    assert "SSL_CERT_FILE" in said and "Is the server running?" not in said
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert call(server, "voices", "ls") == 0
    other = server.url.replace("127.0.0.1", "localhost")
    assert main(["voices", "ls", "--url", other]) == 3
    assert "not valid for 'localhost'" in capsys.readouterr().err


def test_a_server_without_tls_is_called_that(server, capsys, monkeypatch):
    monkeypatch.setattr(server, "handle_error", lambda *_: None)
    server.url = server.url.replace("http", "https")
    assert call(server, "voices", "ls") == 3
    assert "it speaks no TLS there" in capsys.readouterr().err


def test_a_proxy_that_refuses_is_named(server, capsys, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    server.answers["GET", "http://gpu-7.test/v1/audio/voices"] = (502, {}, b"<html>")
    assert main(["voices", "ls", "--url", "http://gpu-7.test"]) == 1
    assert f"says the proxy {server.url} (http_proxy)" in capsys.readouterr().err


def test_a_redirection_is_told_and_not_followed(server, capsys):
    elsewhere = {"Location": "https://voices.test/v1/audio/voices"}
    server.answers["GET", "/v1/audio/voices"] = (301, elsewhere, b"")
    assert call(server, "voices", "ls") == 1
    assert f"redirects to {elsewhere['Location']}" in capsys.readouterr().err
    assert len(server.sent) == 1


def test_an_answer_that_cannot_be_unpacked_is_a_line(server, capsys):
    answer = (200, {"Content-Encoding": "gzip"}, b"not packed")
    server.answers["GET", "/v1/audio/voices"] = answer
    assert call(server, "voices", "ls") == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_nobody_there_says_how_to_name_another(server):
    server.server_close()
    for url in ("http://127.0.0.1:9", "http://["):
        with (
            VoicesClient(url) as client,
            pytest.raises(errors.ServerUnreachableError, match="SPEAKER_URL"),
        ):
            client.get("ann")


def test_speech_that_is_not_saved_says_so(server, tmp_path, capsys):
    server.answers["POST", "/v1/audio/speech"] = (200, {}, b"RIFF")
    spoken = "voices", "try", "ann", "--model", "m"
    assert call(server, *spoken) == 0
    said = capsys.readouterr()
    assert said.err == "not saved; --out FILE.wav saves it\n"
    assert "not saved" not in said.out
    assert call(server, *spoken, "--out", tmp_path / "a.wav") == 0
    assert "not saved" not in capsys.readouterr().err
