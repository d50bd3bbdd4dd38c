import contextlib
import functools
import http.server
import socket
import ssl
import subprocess
import threading

import aiohttp
import pytest
from aiohttp import ThreadedResolver
from vllm.multimodal.media import MediaConnector

from tests.unit import test_inline
from vllm_tts_cache.entrypoints.serving.fetching import FetchConnection, fetch_audio
from vllm_tts_cache.errors import InvalidAudioError

media, web = test_inline.media, test_inline.web
store, clips = test_inline.store, test_inline.clips


@pytest.fixture
async def connection():
    connection = FetchConnection(max_waiting=4)
    yield connection
    await (await connection.get_async_client()).close()
    connection.shutdown()


def through(connection):
    return functools.partial(fetch_audio, MediaConnector(connection=connection))


async def resolver_of(connection):
    connector = (await connection.get_async_client()).connector
    assert isinstance(connector, aiohttp.TCPConnector)
    return connector._resolver


async def test_a_clip_is_fetched_by_the_name_of_its_host(clips, web, connection):
    url = web.replace("127.0.0.1", "localhost") + "/clip.wav"
    clip = await clips.resolve(url, through(connection))
    assert clip.num_samples == 48_000


@pytest.mark.parametrize("family", [socket.AF_UNSPEC, socket.AF_INET])
async def test_a_name_has_the_addresses_that_aiohttp_finds(connection, family):
    ours = await resolver_of(connection)
    for host in ("localhost", "127.0.0.1"):
        found = await ours.resolve(host, 80, family)
        assert found == await ThreadedResolver().resolve(host, 80, family)
        assert found


async def test_a_name_that_is_not_there_is_the_callers_mistake(
    clips, connection, monkeypatch
):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    connector = through(connection)
    with pytest.raises(InvalidAudioError, match="no such name"):
        await clips.resolve("http://absent.example/clip.wav", connector)


@contextlib.contextmanager
def tls_server(tmp_path, *options, max_version=None):
    """A web server with a certificate of its own; gives its address."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"]
    made += ["-subj", "/CN=a", "-keyout", key, "-out", cert, *options]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if max_version is not None:
        context.maximum_version = max_version
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def refusal(clips, connection, url):
    with pytest.raises(InvalidAudioError) as refused:
        await clips.resolve(f"{url}/c.wav", through(connection))
    return str(refused.value)


async def test_a_certificate_that_is_not_trusted_is_called_so(
    clips, connection, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    with tls_server(tmp_path) as url:
        told = await refusal(clips, connection, url)
    assert "the certificate of its server is not trusted (self-signed certif" in told
    assert "data URL" in told and "Invalid URL" not in told
    its_own = ("-addext", "subjectAltName=DNS:another.example")
    with tls_server(tmp_path, *its_own) as url:
        client = await connection.get_async_client()
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        monkeypatch.setattr(client.connector, "_ssl", trusting)
        told = await refusal(clips, connection, url)
    assert "is not trusted (IP address mismatch" in told


async def test_a_server_without_tls_and_one_of_an_old_kind_are_told_apart(
    clips, web, connection, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    told = await refusal(clips, connection, web.replace("http:", "https:"))
    assert "its server speaks no TLS at that port. Try http:// instead" in told
    client = await connection.get_async_client()
    newer = ssl.create_default_context()
    newer.minimum_version = ssl.TLSVersion.TLSv1_3
    monkeypatch.setattr(client.connector, "_ssl", newer)
    with tls_server(tmp_path, max_version=ssl.TLSVersion.TLSv1_2) as url:
        told = await refusal(clips, connection, url)
    assert "agree on no TLS (TLSV1_ALERT_PROTOCOL_VERSION)" in told


async def test_what_is_not_there_is_named_without_another_apis_field(
    clips, web, connection
):
    told = await refusal(clips, connection, web)
    assert "HTTP 404" in told and "image_url" not in told
