"""A body that is too large, and does not say so: refused while it arrives."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from tests.fault.hostile_input import BOUNDARY, MULTIPART, VOICES, part
from tests.speech_server import listening
from tests.waiting import soon

MAX_BYTES = 11 * 1024**2  # as docs/http-api.md says
CHUNK = bytes(64 * 1024)
# What is on its way when the answer comes: in sockets and in the web server.
ON_ITS_WAY = 16 * 1024**2


@pytest.fixture
def spool(tmp_path, monkeypatch):
    """Where uploads are received."""
    directory = tmp_path / "spool"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def spooled_bytes(spool):
    """Of files that are open there, which have no name."""
    num_bytes = 0
    for handle in Path("/proc/self/fd").iterdir():
        try:
            if str(handle.readlink()).startswith(str(spool)):
                num_bytes += handle.stat().st_size
        except FileNotFoundError:  # it was that of the list itself
            continue
    return num_bytes


class Upload:
    """A chunked upload over a real socket, of a form whose one clip has no end."""

    def __init__(self, reader, writer):
        self._reader = reader
        self._writer = writer
        self.num_bytes = 0

    @classmethod
    async def begun(cls, port):
        upload = cls(*await asyncio.open_connection("127.0.0.1", port))
        head = (
            f"POST {VOICES} HTTP/1.1\r\nHost: s\r\nContent-Type: {MULTIPART}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        )
        upload._writer.write(head.encode())
        for name in ("name", "consent"):
            upload._chunk(part(name, b"Ann"))
        upload._chunk(part("audio_sample", b"", "clip.wav"))
        return upload

    async def send(self):
        """Send a little more; False once the server takes no more."""
        self._chunk(CHUNK)
        try:
            await asyncio.wait_for(self._writer.drain(), 60)
        except ConnectionError:
            return False
        return True

    def end(self):
        self._chunk(f"\r\n--{BOUNDARY}--\r\n".encode())
        self._writer.write(b"0\r\n\r\n")

    async def answer(self):
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n"), 60)
        return int(head.split()[1])

    def has_answer(self):
        return len(self._reader._buffer) > 0

    def close(self):
        self._writer.transport.abort()

    def _chunk(self, data):
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.num_bytes += len(data)


async def test_an_upload_without_end_is_refused_while_it_arrives(server, spool):
    """200 MB were received and spooled, and then refused."""
    async with listening(server.app) as port:
        uploads = [await Upload.begun(port) for _ in range(4)]
        most = 0
        while not all(upload.has_answer() for upload in uploads):
            for upload in uploads:
                if not upload.has_answer():
                    await upload.send()
                    assert upload.num_bytes < MAX_BYTES + ON_ITS_WAY
            await asyncio.sleep(0)
            most = max(most, spooled_bytes(spool))
            assert list(spool.iterdir()) == []  # nothing that a crash would leave
        assert [await upload.answer() for upload in uploads] == [413] * 4
        assert 0 < most <= 4 * MAX_BYTES
        assert spooled_bytes(spool) == 0
        for upload in uploads:
            upload.close()
    assert list(spool.iterdir()) == []
    assert server.service.store.num_speakers() == 0
    assert server.service.store.verify() == []


@pytest.mark.parametrize("how", ["leaves", "stays"])
async def test_what_was_received_goes_with_a_client_that_stops(server, spool, how):
    async with listening(server.app) as port:
        upload = await Upload.begun(port)
        while spooled_bytes(spool) < 4 * 1024**2:
            assert await upload.send()
        assert list(spool.iterdir()) == []
        if how == "leaves":
            upload.close()
        else:
            upload.end()
            assert await upload.answer() == 400  # zeros are no clip
        await soon(lambda: not spooled_bytes(spool))
        upload.close()
    assert server.service.store.num_speakers() == 0
