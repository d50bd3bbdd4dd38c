import contextlib
import functools
import http.server
import ipaddress
import socket
import ssl
import threading

import pytest
from vllm.multimodal.media import MediaConnector

from tests.unit import test_inline
from tests.web import Answers, serving, signed_itself
from vllm_tts_cache.audio.decode import CLIP_MAX_BYTES
from vllm_tts_cache.entrypoints.serving import fetching
from vllm_tts_cache.entrypoints.serving.fetching import FetchConnection, fetch_audio
from vllm_tts_cache.errors import InvalidAudioError
from vllm_tts_cache.logs import ThrottledLog

media, web = test_inline.media, test_inline.web
clips = test_inline.clips


@contextlib.asynccontextmanager
async def connected(*networks, domains=()):
    made = [ipaddress.ip_network(network) for network in networks]
    connection = FetchConnection(max_waiting=4, networks=made)
    connection.domains = domains
    yield connection
    await (await connection.get_async_client()).close()
    connection.shutdown()


@pytest.fixture
async def connection():
    async with connected("127.0.0.1/32", "::1/128") as made:
        yield made


def through(connection):
    return functools.partial(fetch_audio, MediaConnector(connection=connection))


INSIDE = (
    *("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]"),
    *("169.254.169.254", "10.0.0.1", "100.64.0.1", "192.168.1.1", "224.0.0.1"),
    *("[fe80::1]", "[fec0::1]", "[fd00::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
    *("[::127.0.0.1]", "[ff02::1]", "192.0.0.192", "168.63.129.16"),
)


@pytest.mark.parametrize("host", INSIDE)
async def test_no_url_leads_inside(clips, web, host):
    port = web.rpartition(":")[2]
    async with connected() as connection:
        told = await refusal(clips, connection, f"http://{host}:{port}")
    assert "its host has no public address" in told and port not in told
    assert test_inline.CountingHandler.fetched == []


@pytest.mark.parametrize("there", ["http://127.0.0.2", "http://[::ffff:10.0.0.1]"])
async def test_nor_does_a_redirect(clips, connection, there):
    with serving() as inside:
        inside.answers["GET", "/c.wav"] = 302, {"Location": f"{there}:9/meta"}, b""
        told = await refusal(clips, connection, inside.url)
    assert "its host has no public address" in told


async def test_a_redirect_stays_within_the_allowed_domains(clips, web):
    async with connected("127.0.0.1/32", domains=["localhost"]) as connection:
        with serving() as allowed:
            url = allowed.url.replace("127.0.0.1", "localhost")
            clip = {"Location": f"{web}/clip.wav"}
            allowed.answers["GET", "/c.wav"] = 302, clip, b""
            told = await refusal(clips, connection, url)
    assert told.endswith(": it leads to none of the allowed domains (localhost)")
    assert test_inline.CountingHandler.fetched == []


async def test_of_servers_inside_one_text_is_told(clips, web, connection, monkeypatch):
    """By an answer's time neither: what is not there is asked for again, too."""
    monkeypatch.setattr(fetching, "_RETRY_SECONDS", 0.01)
    asked = (web, "http://127.0.0.1:9", web.replace("http:", "https:"))
    told = {await refusal(clips, connection, url) for url in asked}
    assert len(told) == 1
    assert told.pop().endswith("cannot be fetched: its server does not give it")
    assert len(test_inline.CountingHandler.fetched) == 3


async def test_where_the_host_fetches_itself_it_tells_no_more(web, plain):
    """A ValueError is a 400 of its own; of others it shows what they say in a 500."""
    connector = MediaConnector(connection=plain)
    with pytest.raises(ValueError) as refused:
        await connector.fetch_audio_async(f"{web}/c.wav")
    assert str(refused.value).endswith("its URL cannot be fetched: HTTP 404 error")
    with pytest.raises(NotImplementedError):
        connector.fetch_audio(f"{web}/c.wav")


async def test_a_retry_is_logged_without_a_url(clips, caplog, connection, monkeypatch):
    monkeypatch.setattr(fetching, "throttled", ThrottledLog())
    with serving() as busy:
        busy.answers["GET", "/c.wav"] = 503, {}, b"SlowDown"
        await refusal(clips, connection, busy.url)
    assert len(busy.sent) > 1
    (line,) = {record.getMessage() for record in caplog.records}
    assert line == "Fetching a reference again after ClientResponseError"


async def test_a_file_that_is_too_large_is_fetched_once(clips, connection):
    with serving() as web:
        web.answers["GET", "/c.wav"] = 200, {}, bytes(CLIP_MAX_BYTES + 1)
        assert "size exceeded" in await refusal(clips, connection, web.url)
    assert len(web.sent) == 1


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_of_a_proxy_one_text_is_told(clips, monkeypatch, scheme):
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    told = set()
    with serving() as proxy:
        for url in (proxy.url, "http://127.0.0.1:9", "http://proxy.invalid"):
            monkeypatch.setenv(f"{scheme}_proxy", url)
            async with connected() as connection:
                told.add(await refusal(clips, connection, f"{scheme}://voices.example"))
    assert len(told) == 1
    assert told.pop().endswith("fetched: the proxy of this server does not give it")


async def test_a_proxy_may_be_inside_and_leads_nobody_inside(clips, monkeypatch):
    with serving() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        proxy.answers["GET", "http://voices.example/c.wav"] = 200, {}, test_inline.wav()
        async with connected() as connection:
            fetch = through(connection)
            assert await clips.resolve("http://voices.example/c.wav", fetch)
            for host in ("10.0.0.1", "127.1", "2130706433", "0x7f.1", "10.0.0.1."):
                told = await refusal(clips, connection, f"http://{host}")
                assert "its host has no public address" in told
    assert len(proxy.sent) == 1


async def test_no_cookie_or_password_is_sent(clips, tmp_path, monkeypatch):
    netrc, host = tmp_path / "netrc", "xn--bcher-kva.example"
    netrc.write_text("default login operator password secret")
    monkeypatch.setenv("NETRC", str(netrc))
    look_up = socket.getaddrinfo
    local = lambda _, *given, **named: look_up("127.0.0.1", *given, **named)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", local)
    with serving() as site:
        url, cookie = site.url.replace("127.0.0.1", host), {"Set-Cookie": "a=b"}
        site.answers["GET", "/c.wav"] = 200, cookie, test_inline.wav()
        async with connected("127.0.0.1/32", domains=[host]) as connection:
            for number in range(2):
                await clips.resolve(f"{url}/c.wav?{number}", through(connection))
    assert len(site.heads) == 2
    assert not any("Cookie" in h or "Authorization" in h for h in site.heads)


async def test_a_clip_is_fetched_by_the_name_of_its_host(clips, web, connection):
    url = web.replace("127.0.0.1", "localhost") + "/clip.wav"
    clip = await clips.resolve(url, through(connection))
    assert clip.num_samples == 48_000


async def test_a_name_that_is_not_there_is_told_as_one_inside(clips, monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    async with connected() as connection:
        inside = await refusal(clips, connection, "http://localhost")
        monkeypatch.setattr(socket, "getaddrinfo", fail)
        assert await refusal(clips, connection, "http://absent.example") == inside


@contextlib.contextmanager
def tls_server(tmp_path, *options, max_version=None):
    """A web server with a certificate of its own; gives its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed_itself(tmp_path, *options))
    if max_version is not None:
        context.maximum_version = max_version
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
async def plain(monkeypatch):
    """A connection that reaches a server here as if it were public, and asks once."""
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    monkeypatch.setattr(fetching, "_is_public", lambda _ip: True)
    async with connected() as made:
        yield made


async def refusal(clips, connection, url):
    with pytest.raises(InvalidAudioError) as refused:
        await clips.resolve(f"{url}/c.wav", through(connection))
    return str(refused.value)


async def test_an_untrusted_certificate_is_named(clips, plain, tmp_path, monkeypatch):
    with tls_server(tmp_path) as url:
        told = await refusal(clips, plain, url)
    assert "the certificate of its server is not trusted (self-signed certif" in told
    assert "data URL" in told and "Invalid URL" not in told
    its_own = ("-addext", "subjectAltName=DNS:another.example")
    with tls_server(tmp_path, *its_own) as url:
        client = await plain.get_async_client()
        trusting = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
        monkeypatch.setattr(client.connector, "_ssl", trusting)
        told = await refusal(clips, plain, url)
    assert "is not trusted (IP address mismatch" in told


async def test_a_server_without_tls_and_one_of_an_old_kind_are_told_apart(
    clips, web, plain, tmp_path, monkeypatch
):
    told = await refusal(clips, plain, web.replace("http:", "https:"))
    assert "its server speaks no TLS at that port. Try http:// instead" in told
    client = await plain.get_async_client()
    newer = ssl.create_default_context()
    newer.minimum_version = ssl.TLSVersion.TLSv1_3
    monkeypatch.setattr(client.connector, "_ssl", newer)
    with tls_server(tmp_path, max_version=ssl.TLSVersion.TLSv1_2) as url:
        told = await refusal(clips, plain, url)
    assert "agree on no TLS (TLSV1_ALERT_PROTOCOL_VERSION)" in told


async def test_of_a_redirects_target_its_status_at_most_is_told(clips, web, plain):
    for there, expected in (
        (f"{web}/key-7", "HTTP 404 error"),
        ("http://127.0.0.1:9/key-7", "its server cannot be reached, or breaks off"),
        ("ftp://inside.example/key-7", "it leads to what is no HTTP address"),
        ("http://[::7/key-7", "it leads to what is no HTTP address"),
    ):
        with serving() as site:
            site.answers["GET", "/c.wav"] = 302, {"Location": there}, b""
            told = await refusal(clips, plain, site.url)
        assert told.endswith(f" cannot be fetched: {expected}")


@pytest.mark.parametrize("num_interim", [5, 1_000])
async def test_endless_interim_answers_are_left(clips, plain, monkeypatch, num_interim):
    monkeypatch.setattr(Answers, "protocol_version", "HTTP/1.1")
    wav = test_inline.wav()
    interim = b"HTTP/1.1 102 Processing\r\n\r\n" * num_interim
    last = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(wav)
    with serving() as site:
        site.answers["GET", "/c.wav"] = 102, {}, interim + last + wav
        if num_interim == 5:
            assert await clips.resolve(f"{site.url}/c.wav", through(plain))
        else:
            assert "breaks off" in await refusal(clips, plain, site.url)
