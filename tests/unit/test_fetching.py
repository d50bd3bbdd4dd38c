import socket

import aiohttp
import pytest
from aiohttp import ThreadedResolver
from vllm.multimodal.media import MediaConnector

from tests.unit import test_inline
from vllm_tts_cache.entrypoints.fetching import FetchConnection
from vllm_tts_cache.errors import InvalidAudioError

media, web = test_inline.media, test_inline.web
store, clips = test_inline.store, test_inline.clips


@pytest.fixture
async def connection():
    connection = FetchConnection(max_waiting=4)
    yield connection
    await (await connection.get_async_client()).close()
    connection.shutdown()


async def resolver_of(connection):
    connector = (await connection.get_async_client()).connector
    assert isinstance(connector, aiohttp.TCPConnector)
    return connector._resolver


async def test_a_clip_is_fetched_by_the_name_of_its_host(clips, web, connection):
    url = web.replace("127.0.0.1", "localhost") + "/clip.wav"
    clip = await clips.resolve(url, MediaConnector(connection=connection))
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
    connector = MediaConnector(connection=connection)
    with pytest.raises(InvalidAudioError, match="no such name"):
        await clips.resolve("http://absent.example/clip.wav", connector)
