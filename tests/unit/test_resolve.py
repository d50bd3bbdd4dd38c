import asyncio
import base64
import functools
import http.server
import shutil
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from vllm.connections import HTTPConnection
from vllm.multimodal.media import MediaConnector

from tests.audio_clips import sndfile_bytes, voiced
from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints import resolve
from vllm_tts_cache.entrypoints.resolve import Clip, InlineClips, single_url
from vllm_tts_cache.entrypoints.storage import open_storage
from vllm_tts_cache.errors import InvalidAudioError


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


class CountingHandler(QuietHandler):
    fetched: ClassVar[list[str]] = []

    def do_GET(self):
        self.fetched.append(self.path)
        time.sleep(0.2)  # long enough for everybody to ask meanwhile
        super().do_GET()


@pytest.fixture
def storage(tmp_path):
    return open_storage(Settings(samples_dir=tmp_path / "voices"))


@pytest.fixture
def clips(storage):
    return InlineClips(storage)


@pytest.fixture
def media(tmp_path):
    directory = tmp_path / "media"
    directory.mkdir()
    (directory / "clip.wav").write_bytes(wav())
    return directory


@pytest.fixture
def web(media):
    """A web server with the files of `media`; gives its address."""
    handler = functools.partial(CountingHandler, directory=str(media))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serve = functools.partial(server.serve_forever, poll_interval=0.01)
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def wav(container="WAV", **kwargs):
    samples = (voiced(**kwargs) * 32767).astype(np.int16)
    return sndfile_bytes(samples, 24_000, container)


def data_url(data, media_type="audio/wav"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def connector(**allowed):
    return MediaConnector(**allowed)


async def test_a_data_url_is_stored_inline_and_measured(clips, storage):
    clip = await clips.resolve(data_url(wav()), connector())
    assert clip.ref.segment is Segment.INLINE
    assert (clip.num_samples, clip.sample_rate_hz) == (48_000, 24_000)
    assert storage.audio.get(clip.ref.audio_sha256) is not None


async def test_concurrent_requests_for_one_url_fetch_it_once(clips, web):
    CountingHandler.fetched.clear()
    url = f"{web}/clip.wav"
    # The host's own connection outlives the event loop of a test.
    connection = HTTPConnection()
    mine = connector(connection=connection)
    found = await asyncio.gather(*(clips.resolve(url, mine) for _ in range(8)))
    assert len(set(found)) == 1 and CountingHandler.fetched == ["/clip.wav"]
    await clips.resolve(url, mine)
    assert len(CountingHandler.fetched) == 2
    await (await connection.get_async_client()).close()


async def test_one_clip_is_one_address_whatever_carries_it(clips, media, web):
    urls = [
        data_url(wav()),
        data_url(wav("FLAC"), "audio/flac"),
        data_url(wav()).replace("data:", "DATA:"),
        (media / "clip.wav").as_uri(),
        f"{web}/clip.wav",
    ]
    allowed = connector(allowed_local_media_path=str(media))
    found = {await clips.resolve(url, allowed) for url in urls}
    assert len(found) == 1


async def test_a_repeated_data_url_is_not_decoded_again(clips, monkeypatch):
    url, num_decodes, decode = data_url(wav()), 0, resolve.decode_data_url

    def counted(text):
        nonlocal num_decodes
        num_decodes += 1
        return decode(text)

    monkeypatch.setattr(resolve, "decode_data_url", counted)
    first = await clips.resolve(url, connector())
    assert await clips.resolve(url, connector()) == first
    assert num_decodes == 1


async def test_a_known_data_url_whose_audio_was_removed_is_stored_again(
    clips, storage, tmp_path
):
    first = await clips.resolve(data_url(wav()), connector())
    shutil.rmtree(tmp_path / "voices" / "audio")
    assert await clips.resolve(data_url(wav()), connector()) == first
    assert storage.audio.get(first.ref.audio_sha256) is not None


async def test_only_so_many_data_urls_are_remembered(clips, monkeypatch):
    monkeypatch.setattr(resolve, "MAX_REMEMBERED_CLIPS", 2)
    for pitch_hz in (200, 300, 400):
        await clips.resolve(data_url(wav(pitch_hz=pitch_hz)), connector())
    assert len(clips._known) == 2


@pytest.mark.parametrize(
    "url",
    ["data:", "data:,", "data:audio/wav;base64,", "data:audio/wav;base64,####"],
)
async def test_a_broken_data_url_is_refused_and_stores_nothing(clips, storage, url):
    with pytest.raises(InvalidAudioError):
        await clips.resolve(url, connector())
    assert storage.verify() == []


@pytest.mark.parametrize("data", [b"garbage", wav(seconds=0.5), wav(peak=0.0)])
async def test_unusable_audio_is_refused_from_everywhere(clips, media, web, data):
    (media / "bad.wav").write_bytes(data)
    allowed = connector(allowed_local_media_path=str(media))
    for url in (data_url(data), (media / "bad.wav").as_uri(), f"{web}/bad.wav"):
        with pytest.raises(InvalidAudioError):
            await clips.resolve(url, allowed)


async def test_no_file_is_read_unless_the_operator_allows_a_directory(clips, media):
    with pytest.raises(InvalidAudioError, match="allowed-local-media-path"):
        await clips.resolve((media / "clip.wav").as_uri(), connector())


@pytest.mark.parametrize("how", ["beside", "dots", "symlink"])
async def test_a_file_outside_the_allowed_directory_is_refused(
    clips, storage, media, tmp_path, how
):
    outside = tmp_path / "outside.wav"
    outside.write_bytes(wav())
    (media / "link.wav").symlink_to(outside)
    url = {
        "beside": outside.as_uri(),
        "dots": f"file://{media}/../outside.wav",
        "symlink": (media / "link.wav").as_uri(),
    }[how]
    with pytest.raises(InvalidAudioError, match="must be a subpath"):
        await clips.resolve(url, connector(allowed_local_media_path=str(media)))
    assert not any((tmp_path / "voices" / "audio").rglob("*.wav"))


async def test_a_file_that_is_not_there_is_the_callers_mistake(clips, media):
    url = (media / "absent.wav").as_uri()
    with pytest.raises(InvalidAudioError):
        await clips.resolve(url, connector(allowed_local_media_path=str(media)))


async def test_a_domain_that_is_not_allowed_is_refused(clips, web):
    allowed = connector(allowed_media_domains=["example.org"])
    with pytest.raises(InvalidAudioError, match="allowed domains"):
        await clips.resolve(f"{web}/clip.wav", allowed)


@pytest.mark.parametrize("url", ["ftp://example.org/x.wav", "clip.wav", "", "/etc/x"])
async def test_other_urls_are_refused(clips, url):
    with pytest.raises(InvalidAudioError):
        await clips.resolve(url, connector())


async def test_an_address_that_nobody_answers_is_the_callers_mistake(clips):
    with pytest.raises(InvalidAudioError, match="cannot be fetched"):
        await clips.resolve("http://127.0.0.1:9/clip.wav", connector())


async def test_a_download_stops_at_the_limit(clips, media, web):
    (media / "big.wav").write_bytes(bytes(11_000_000))
    with pytest.raises(InvalidAudioError, match=r"cannot be (fetched|used)"):
        await clips.resolve(f"{web}/big.wav", connector())


@pytest.mark.parametrize("given", ["data:x", ["data:x"]])
def test_one_url_is_one_url(given):
    assert single_url(given) == "data:x"


@pytest.mark.parametrize("given", [[], ["a", "b"], [1], [["a"]], None, 3])
def test_no_or_several_urls_are_refused(given):
    with pytest.raises(InvalidAudioError, match="one URL"):
        single_url(given)


def test_a_registered_speaker_is_a_clip_unless_it_is_an_embedding(storage):
    audio_fields = {
        "audio_sha256": "a" * 64,
        "num_samples": 24_000,
        "sample_rate_hz": 24_000,
    }
    new = NewSpeaker(name="Ann", consent="yes", **audio_fields)
    clip = Clip.of_record(storage.registry.register(new).record)
    assert clip is not None
    assert clip.ref.segment is Segment.REGISTERED
    assert clip.num_samples == 24_000
    raw = NewSpeaker(name="Bob", consent="yes", embedding=(1.0,))
    assert Clip.of_record(storage.registry.register(raw).record) is None
