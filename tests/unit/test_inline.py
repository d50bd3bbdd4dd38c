import asyncio
import base64
import contextlib
import functools
import http.server
import threading
import time
from typing import ClassVar

import pytest
from vllm.connections import HTTPConnection
from vllm.multimodal.media import MediaConnector

from tests.speaking import wav
from tests.waiting import soon
from vllm_tts_cache.audio.decode import CLIP_MAX_BYTES
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.entrypoints.serving.fetching import fetch_audio
from vllm_tts_cache.entrypoints.speakers import inline
from vllm_tts_cache.entrypoints.speakers.inline import InlineClips
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.errors import InvalidAudioError, ServerBusyError


class CountingHandler(http.server.SimpleHTTPRequestHandler):
    fetched: ClassVar[list[str]] = []
    gate = threading.Event()
    num_flooded = 0
    pause_seconds = 0.2  # long enough for everybody to ask meanwhile

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        self.fetched.append(self.path)
        if self.path.startswith("/drip"):
            self._drip()
        elif self.path.startswith("/flood"):
            self._flood()
        else:
            time.sleep(self.pause_seconds)
            super().do_GET()

    def _flood(self):
        """Without a length, ten times as much as is taken."""
        self.send_response(200)
        self.end_headers()
        type(self).num_flooded = 0
        with contextlib.suppress(OSError):
            while self.num_flooded < 10 * CLIP_MAX_BYTES:
                self.wfile.write(bytes(64 * 1024))
                type(self).num_flooded += 64 * 1024

    def _drip(self):
        """A byte now and then: no single read ever takes too long."""
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.gate.wait(0.05):
                self.wfile.write(b"x")
                self.wfile.flush()


@pytest.fixture
def two_remembered(monkeypatch):
    """Before the clips are made: name it before `clips`."""
    monkeypatch.setattr(inline, "MAX_REMEMBERED_CLIPS", 2)


@pytest.fixture
def clips(store):
    lookups = ReadExecutor(is_local=True)
    clips = InlineClips(store, lookups, max_fetches=4, refuses=lambda _: False)
    yield clips
    clips.shutdown()


@pytest.fixture
def media(tmp_path):
    directory = tmp_path / "media"
    directory.mkdir()
    (directory / "clip.wav").write_bytes(wav())
    return directory


@pytest.fixture
def web(media):
    handler = functools.partial(CountingHandler, directory=str(media))
    CountingHandler.fetched.clear()
    CountingHandler.gate.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serve = functools.partial(server.serve_forever, poll_interval=0.01)
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        CountingHandler.gate.set()
        server.shutdown()


@pytest.fixture
async def mine():
    """A connector of this loop; the host's own connection outlives it."""
    connection = HTTPConnection()
    yield connector(connection=connection)
    await (await connection.get_async_client()).close()


def data_url(data, media_type="audio/wav"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def connector(**allowed):
    return functools.partial(fetch_audio, MediaConnector(**allowed))


@pytest.fixture
def num_decodes(monkeypatch):
    decoded, decode = [], inline.decode_data_url

    def counted(text):
        decoded.append(text)
        return decode(text)

    monkeypatch.setattr(inline, "decode_data_url", counted)
    return lambda: len(decoded)


async def test_concurrent_requests_for_one_url_fetch_it_once(clips, web, mine):
    url = f"{web}/clip.wav"
    found = await asyncio.gather(*(clips.resolve(url, mine) for _ in range(8)))
    assert len(set(found)) == 1 and CountingHandler.fetched == ["/clip.wav"]
    await clips.resolve(url, mine)
    assert len(CountingHandler.fetched) == 2


async def test_five_requests_with_one_clip_decode_it_once(clips, num_decodes):
    url = data_url(wav())
    found = await asyncio.gather(*(clips.resolve(url, connector()) for _ in range(5)))
    assert {*found, await clips.resolve(url, connector())} == {found[0]}
    assert num_decodes() == 1


async def test_the_data_urls_used_last_are_kept(two_remembered, clips, num_decodes):
    urls = [data_url(wav(pitch_hz=pitch)) for pitch in (200, 300, 400)]
    for url in (urls[0], urls[1], urls[0], urls[2], urls[0]):
        await clips.resolve(url, connector())
    assert num_decodes() == 3
    await clips.resolve(urls[1], connector())
    assert num_decodes() == 4


async def test_what_is_deleted_is_not_remembered(clips, num_decodes, monkeypatch):
    clip = await clips.resolve(data_url(wav()), connector())
    clips.delete("0" * 64)
    await clips.resolve(data_url(wav()), connector())
    assert num_decodes() == 1
    clips.delete(clip.ref.audio_sha256)
    assert clips._known == {}
    decode = inline.decode_data_url

    def deleted_meanwhile(url):
        clips.delete(clip.ref.audio_sha256)
        return decode(url)

    monkeypatch.setattr(inline, "decode_data_url", deleted_meanwhile)
    await clips.resolve(data_url(wav()), connector())
    assert clips._known == {}


@pytest.mark.parametrize("data", [b"garbage", wav(seconds=0.5), wav(peak=0.0)])
async def test_unusable_audio_is_refused_from_everywhere(clips, media, web, mine, data):
    (media / "bad.wav").write_bytes(data)
    connection = mine.args[0].connection
    allowed = connector(allowed_local_media_path=str(media), connection=connection)
    for url in (data_url(data), (media / "bad.wav").as_uri(), f"{web}/bad.wav"):
        with pytest.raises(InvalidAudioError):
            await clips.resolve(url, allowed)


async def test_no_file_is_read_unless_the_operator_allows_a_directory(clips, media):
    with pytest.raises(InvalidAudioError, match="allowed-local-media-path"):
        await clips.resolve((media / "clip.wav").as_uri(), connector())


async def test_a_file_outside_the_directory_is_refused(clips, store, media, tmp_path):
    outside = tmp_path / "outside.wav"
    outside.write_bytes(wav())
    (media / "link.wav").symlink_to(outside)
    allowed = connector(allowed_local_media_path=str(media))
    for url in (
        outside.as_uri(),
        f"file://{media}/../outside.wav",
        (media / "link.wav").as_uri(),
    ):
        with pytest.raises(InvalidAudioError, match="must be a subpath"):
            await clips.resolve(url, allowed)
    with pytest.raises(InvalidAudioError):
        await clips.resolve((media / "absent.wav").as_uri(), allowed)
    assert store.usage()[Segment.INLINE]["audio"].num_files == 0


async def test_a_file_is_read_no_further_than_the_limit(clips, media, monkeypatch):
    (media / "big.wav").write_bytes(bytes(2 * CLIP_MAX_BYTES))
    read, decode = [], inline.decode

    def noted(data):
        read.append(len(data))
        return decode(data)

    monkeypatch.setattr(inline, "decode", noted)
    with pytest.raises(InvalidAudioError, match="at most"):
        await clips.resolve(
            (media / "big.wav").as_uri(), connector(allowed_local_media_path=str(media))
        )
    assert read == [CLIP_MAX_BYTES + 1]


async def test_a_download_stops_at_the_limit(clips, web, mine):
    with pytest.raises(InvalidAudioError, match="cannot be fetched"):
        await clips.resolve(f"{web}/flood", mine)
    # What is in sockets and buffers comes on top.
    assert CountingHandler.num_flooded < 2 * CLIP_MAX_BYTES


async def test_a_server_that_drips_is_left_after_a_time(clips, web, mine, monkeypatch):
    """Without a limit 110 of them stopped all fetching of the process."""
    monkeypatch.setenv("VLLM_AUDIO_FETCH_TIMEOUT", "1")
    began = time.monotonic()
    with pytest.raises(InvalidAudioError, match=r"longer than 1 s"):
        await clips.resolve(f"{web}/drip", mine)
    assert time.monotonic() - began < 5
    assert len(clips._fetches) == 0


async def test_who_joins_a_fetch_takes_no_place_and_the_last_ends_it(clips, web, mine):
    urls = [f"{web}/drip?{number}" for number in range(5)]
    waiting = [asyncio.create_task(clips.resolve(url, mine)) for url in urls[:4]]
    await soon(lambda: len(clips._fetches) == 4)
    with pytest.raises(ServerBusyError) as caught:
        await clips.resolve(urls[4], mine)
    assert caught.value.retry_after_seconds > 0
    joining = asyncio.create_task(clips.resolve(urls[0], mine))
    await asyncio.sleep(0.05)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert not joining.done()
    assert len(clips._fetches) == 1
    joining.cancel()
    await asyncio.wait([joining])
    assert len(clips._fetches) == 0
    await soon(lambda: len(asyncio.all_tasks()) <= 2)  # the test's and the loop's own


async def test_two_clips_are_decoded_at_once_and_64_wait(clips, monkeypatch):
    gate, begun, decode = threading.Event(), [], inline.decode_data_url

    def held(url):
        begun.append(url)
        assert gate.wait(60)
        return decode(url)

    monkeypatch.setattr(inline, "decode_data_url", held)
    one = wav(seconds=1.1)
    urls = [data_url(one, f"audio/{number}") for number in range(2 + 64 + 5)]
    asked = [asyncio.create_task(clips.resolve(url, connector())) for url in urls]
    try:
        await soon(lambda: len(begun) >= 2)
        await soon(lambda: sum(task.done() for task in asked) >= 5)
        refused = [task for task in asked if task.done()]
        assert len(refused) == 5
        assert {type(task.exception()) for task in refused} == {ServerBusyError}
        # Whoever brings one that waits already joins it.
        joining = asyncio.create_task(clips.resolve(begun[0], connector()))
        await asyncio.wait([joining], timeout=0.1)
        assert not joining.done()
        assert len(begun) == 2
    finally:
        gate.set()
    await asyncio.wait(asked)
    assert await joining
