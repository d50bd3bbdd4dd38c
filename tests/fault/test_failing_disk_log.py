"""A disk that fails under a crowd: one line per cause and minute, with a count.

Twenty cold voices on a disk that failed were 516 lines a second.
"""

import asyncio
import errno
import logging
import os
import re
import sqlite3
from collections import Counter

import pytest
from sqlalchemy import Engine

from tests.fault.test_clients_that_leave import clip as inline_clip
from tests.fault.test_clients_that_leave import fields_of
from tests.speaking import wav
from vllm_tts_cache import logs
from vllm_tts_cache.entrypoints.speakers import deletions
from vllm_tts_cache.logs import ThrottledLog

VOICES = "/v1/audio/voices"
NUM_EACH = 40
LEFT_OUT = re.compile(r" \((\d+) more like this were not logged\)$")


class Warned:
    """How often each log was warned of each cause."""

    def __init__(self, monkeypatch):
        self.counts = Counter()
        self._known = set()
        warn_of = ThrottledLog.warn_of

        def counted(log, cause, *args, **kwargs):
            if id(log) not in self._known:
                self._known.add(id(log))
                log._causes.clear()  # another test's minute
            self.counts[id(log), cause] += 1
            return warn_of(log, cause, *args, **kwargs)

        monkeypatch.setattr(ThrottledLog, "warn_of", counted)


class Lines(logging.Handler):
    """What this logger says, at this level or above."""

    def __init__(self, monkeypatch, name, level):
        super().__init__(level)
        self.lines, logger = [], logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [self])
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "level", level)

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(deletions, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(deletions, "AFTER_ERROR_SECONDS", 0.05)


def full(monkeypatch, _):
    """Nothing more can be written."""

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)


def unreadable(monkeypatch, _):
    """What is stored cannot be read, and nothing can be removed."""

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "read", fail)
    monkeypatch.setattr(os, "rename", fail)
    monkeypatch.setattr(os, "unlink", fail)


def without_catalogue(monkeypatch, server):
    """No file of the catalogue's can be opened any more."""

    def fail(*_, **__):
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Engine, "connect", fail)
    monkeypatch.setattr(Engine, "begin", fail)


async def crowd(server, first):
    """Some of everything, many times; answers their statuses."""
    client = server.client
    voices = [f"voice-{number % 10}" for number in range(first, first + NUM_EACH)]
    pitches = range(200 + first, 200 + first + NUM_EACH)
    asked = [
        *(server.register(f"new-{p}", wav(pitch_hz=p)) for p in pitches),
        *(server.speak(**fields_of(inline_clip(p))) for p in pitches),
        *(server.speak(voice=voice) for voice in voices),
        *(server.speak(voice=voice, x_vector_only_mode=True) for voice in voices),
        *(client.post(f"{VOICES}/{voice}/cache?force=true") for voice in voices),
        *(client.get(f"{VOICES}/{voice}/cache") for voice in voices),
        *(client.get(VOICES) for _ in voices),
        *(client.get("/v1/audio/speaker_cache") for _ in voices),
        *(client.delete(f"{VOICES}/{voice}") for voice in voices[:2]),
    ]
    answers = await asyncio.gather(*asked)
    return Counter(answer.status_code for answer in answers)


@pytest.mark.parametrize(
    "disk", [full, pytest.param(unreadable, marks=pytest.mark.long), without_catalogue]
)
async def test_a_crowd_on_a_failing_disk_is_a_line_per_cause(server, monkeypatch, disk):
    lines = Lines(monkeypatch, "vllm.vllm_tts_cache", logging.INFO).lines
    hosts_errors = Lines(monkeypatch, "vllm_omni", logging.ERROR).lines
    for number in range(10):
        clip = wav(pitch_hz=100 + number)
        done = await server.register(f"voice-{number}", clip, ref_text="words")
        assert done.status_code == 200, done.text
    assert (await server.speak(voice="voice-0")).status_code == 200
    shown = (await server.client.get(f"{VOICES}/voice-0")).json()["voice"]
    server.speakers.delete([shown["audio_sha256"]])  # it is on the disk only
    assert lines == []
    warned = Warned(monkeypatch)
    with monkeypatch.context() as breaking:
        disk(breaking, server)
        statuses = await crowd(server, 0)
        assert sum(n for status, n in statuses.items() if status >= 500) > NUM_EACH
        causes = dict(warned.counts)
        assert sum(causes.values()) > 5 * len(causes), causes
        assert len(lines) == len(causes) <= 8, lines
        assert not [line for line in lines if LEFT_OUT.search(line)]
        assert hosts_errors == []
        # A minute later each cause has another, which says how many there were.
        monkeypatch.setattr(logs, "INTERVAL_SECONDS", 0.0)
        del lines[:]
        await crowd(server, NUM_EACH)
        told = [LEFT_OUT.search(line) for line in lines]
        left_out = sum(int(found[1]) for found in told if found)
        again = {cause: n for cause, n in causes.items() if warned.counts[cause] > n}
        assert left_out >= sum(n - 1 for n in again.values()) > 0
