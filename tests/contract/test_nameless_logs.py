"""Our own messages and errors name no voice, and quote no text of one, in a log."""

import asyncio
import importlib
import logging
import os

import pytest

from tests.speaking import data_url, wav
from vllm_tts_cache import logs
from vllm_tts_cache.entrypoints.speakers import deletions
from vllm_tts_cache.errors import EncodeError, StorageFullError

VOICES = "/v1/audio/voices"
NAME = "Xanadu Canary"
TEXT = "Some xanadu words that were spoken."


class Kept(logging.Handler):
    """Lines of every logger, as a handler formats them, tracebacks included."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append((record.name, self.format(record)))

    def naming(self, *words):
        return [
            (name, line)
            for name, line in self.lines
            if any(word.lower() in line.lower() for word in words)
        ]


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """All that is logged at INFO or above, by whomever."""
    monkeypatch.setattr(logs, "INTERVAL_SECONDS", 0.0)  # none is left out
    # vLLM sets its loggers up when it is imported, and takes handlers off.
    importlib.import_module("vllm_omni.entrypoints.openai.api_server")
    handler = Kept()
    # Loggers that do not hand on what they are given have handlers of their own.
    loggers = [logging.getLogger(), *_unattached()]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
    yield handler
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def _unattached():
    known = logging.root.manager.loggerDict.values()
    loggers = [each for each in known if isinstance(each, logging.Logger)]
    return [each for each in loggers if not each.propagate]


async def lived(server):
    """A voice's life, and all that goes wrong in it."""
    get, post = server.client.get, server.client.post
    await server.register(NAME, wav(), ref_text=TEXT, speaker_description=TEXT)
    await server.register(NAME, wav(seconds=2.0), ref_text=TEXT, precompute="true")
    await server.settled()
    await server.register(NAME, b"no audio", ref_text=TEXT)
    await server.register(NAME * 100, wav())
    await server.register("Other", wav(), consent=" ", ref_text=TEXT * 100)
    for path in (f"/{NAME}", f"/{NAME}/cache", "", f"/{NAME}?x={NAME}"):
        await get(VOICES + path)
    await get(VOICES, params={"search": NAME, "after": NAME})
    await post(f"{VOICES}/{NAME}/cache?force=true")
    await changed(server)
    await server.speak(voice=NAME, ref_text=TEXT)
    await server.speak(voice=NAME, input=f"<|endoftext|> {TEXT}")
    await server.speak(voice=f"not {NAME}")
    await server.speak(ref_audio=data_url(), ref_text=TEXT)
    await server.speak(ref_audio=NAME, ref_text=TEXT)
    items = [{"input": TEXT, "voice": f"not {NAME}"}, {"input": TEXT, "voice": NAME}]
    batch = {"model": "m", "items": items}
    answered = await post("/v1/audio/speech/batch", json=batch)
    assert f"not {NAME}" in answered.text, "the client is told"
    for encoder in server.encoders:
        encoder.errors.append(EncodeError("the encoder is broken"))
    await post(f"{VOICES}/{NAME}/cache?force=true")
    await server.client.delete(f"{VOICES}/{NAME}")
    await server.client.delete(f"{VOICES}/{NAME}")
    await get(f"{VOICES}/{NAME}")


async def changed(server):
    """What else the voices routes do with a voice, well and not."""
    client = server.client
    url = f"{VOICES}/{NAME}"
    texts = {"speaker_description": TEXT, "labels": {"who": NAME}}
    assert (await client.patch(url, json=texts)).status_code == 200
    for wrong in ({"name": NAME * 100}, {"labels": {NAME * 100: TEXT}}, {NAME: TEXT}):
        assert (await client.patch(url, json=wrong)).status_code == 400
    assert (await client.get(f"{url}/audio")).status_code == 200
    for data in (wav(), b"no audio"):
        consent = {"recording": ("xanadu.wav", data)}
        form = {"name": NAME, "language": "en-US"}
        await client.post("/v1/audio/voice_consents", data=form, files=consent)
        clip = {"audio_sample": ("xanadu.wav", data)}
        await client.post(f"{VOICES}/check", data={"ref_text": TEXT}, files=clip)
    bundle = (await client.get(f"{url}/bundle")).content
    for data in (bundle, bundle[:-40]):
        taken = {"bundle": ("xanadu.voice", data)}
        await client.post(f"{VOICES}/import", data={"name": NAME}, files=taken)


async def test_a_voices_life_leaves_no_name_in_a_log(server, kept):
    await lived(server)
    assert kept.lines, "nothing was listened to"
    assert kept.naming("xanadu") == []


async def test_a_long_deletion_leaves_no_name_in_a_log(server, kept, monkeypatch):
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 0.0)
    await server.register(NAME, wav(), ref_text=TEXT)

    def fails(*_):
        raise StorageFullError()

    monkeypatch.setattr(server.service.store, "remove_files", fails)
    answer = await server.client.delete(f"{VOICES}/{NAME}")
    assert answer.status_code == 503
    assert NAME in answer.text, "the client is told"
    while not kept.naming("deletion is not finished"):
        await asyncio.sleep(0.01)
    assert kept.naming("xanadu") == []


async def test_a_catalogue_that_fails_leaves_no_name_in_a_log(server, kept):
    await server.register(NAME, wav(), ref_text=TEXT)
    database = server.service.store.database
    with database.write() as db:
        db.exec_driver_sql("ALTER TABLE speaker RENAME TO elsewhere")
    try:
        again = await server.register(NAME, wav(seconds=2.0), ref_text=TEXT)
        assert again.status_code == 500
        shown = await server.client.get(f"{VOICES}/{NAME}")
        spoken = await server.speak(voice=NAME)
        assert shown.status_code == spoken.status_code == 500
    finally:
        with database.write() as db:
            db.exec_driver_sql("ALTER TABLE elsewhere RENAME TO speaker")
    assert kept.naming("no such table"), "it was logged"
    assert kept.naming("xanadu") == []


async def test_a_file_of_stock_that_is_not_imported_is_not_named(tmp_path, kept):
    from vllm_tts_cache.config import Settings
    from vllm_tts_cache.store.opening import open_store

    (tmp_path / "xanadu_1.safetensors").write_bytes(os.urandom(64))
    open_store(Settings(samples_dir=tmp_path)).close()
    assert kept.naming("1 files of stock vLLM-Omni")
    assert kept.naming("xanadu") == []
