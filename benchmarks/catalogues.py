"""What a look-up takes over SQLite and over PostgreSQL, beside each other.

    python -m benchmarks.catalogues [--voices 100000] [--url postgresql://...]

The databases are the command's own and hold rows without files. Without a URL it starts
Debian's PostgreSQL, as the tests do, on a Unix socket and without fsync: a look-up
writes nothing.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import text

from vllm_tts_cache.catalogue import tenant_usage
from vllm_tts_cache.catalogue.catalogue import Catalogue, open_catalogue
from vllm_tts_cache.catalogue.dialect import is_postgres
from vllm_tts_cache.catalogue.pages import Page

NUM_LOOKS = 5_000
_SLICE = 50_000  # rows of a transaction
_VOICE = """INSERT INTO speaker (tenant, name_key, name, speaker_id, audio_sha256,
    num_samples, sample_rate_hz, consent, created_at, labels_json, search_text)
    SELECT 'default', {name}, {name}, 'voice_' || {hex}, {hex} || {hex}, 1, 1, 'yes', n,
    '{{"team": "team ' || (n - n / {num_teams} * {num_teams}) || '"}}', {name}
    FROM {numbers}"""
_FILE = """INSERT INTO stored_file (audio_sha256, kind, segment, is_audio, num_bytes,
    used_at, created_at) SELECT {hex} || {hex}, '{kind}', 'registered', {is_audio}, 1,
    n, n FROM {numbers}"""
# A thousand voices of a million have the same label.
_LABEL = """INSERT INTO speaker_label (generation, label_key, label_value, tenant,
    name_key, created_at) SELECT generation, 'team',
    'team ' || (generation - generation / {num_teams} * {num_teams}), tenant, name_key,
    created_at FROM speaker WHERE generation > {last_number}"""
_SPELLINGS = {
    False: {
        "name": "printf('s%07d', n)",
        "hex": "printf('%032x', n)",
        "numbers": "(WITH RECURSIVE c(n) AS (VALUES ({first}) UNION ALL SELECT n + 1"
        " FROM c WHERE n < {last}) SELECT n FROM c) AS numbers",
    },
    True: {
        "name": "'s' || lpad(n::text, 7, '0')",
        "hex": "lpad(to_hex(n), 32, '0')",
        "numbers": "generate_series({first}, {last}) AS n",
    },
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--voices", type=int, default=100_000)
    arguments.add_argument("--url", help="an empty database")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory, _server(given.url) as url:
        for name, where in (("SQLite", ""), ("PostgreSQL", url)):
            catalogue = open_catalogue(Path(directory), where)
            took = fill(catalogue, given.voices)
            print(f"{name}: {given.voices} voices, written in {took:.0f} s")
            for line in measured(catalogue, given.voices):
                print(f"  {line}")
            print(
                f"  {_size(catalogue) / given.voices:.0f} bytes of the database a voice"
            )
            catalogue.close()
            began = time.perf_counter()
            catalogue = open_catalogue(Path(directory), where)
            catalogue.find("nobody")
            print(f"  opened and asked: {1e3 * (time.perf_counter() - began):.0f} ms")
            catalogue.close()
        print(f"this process: {psutil.Process().memory_info().rss / 1e6:.0f} MB")


def fill(catalogue: Catalogue, num_voices: int) -> float:
    """Write rows of voices, each with audio and an encoding; returns the seconds."""
    began = time.monotonic()
    for first in range(1, num_voices + 1, _SLICE):
        with catalogue.database.write() as db:
            words = dict(_SPELLINGS[is_postgres(db)])
            last = min(num_voices, first + _SLICE - 1)
            words["numbers"] = words["numbers"].format(first=first, last=last)
            words["num_teams"] = str(max(1, num_voices // 1000))
            for statement in (
                _VOICE.format(**words),
                _FILE.format(kind="audio", is_audio=1, **words),
                _FILE.format(kind="e" * 64, is_audio=0, **words),
                _LABEL.format(last_number=first - 1, **words),
            ):
                db.exec_driver_sql(statement)
    with catalogue.database.write_long() as db:
        tenant_usage.recount(db)
    with catalogue.database.read() as db:
        db.execute(text("ANALYZE"))
    return time.monotonic() - began


def measured(catalogue: Catalogue, num_voices: int) -> Iterator[str]:
    """Times of what requests ask, a line each."""
    chance = random.Random(0)

    def name() -> str:
        return f"S{chance.randrange(1, num_voices + 1):07d}"

    def look() -> None:
        assert catalogue.find(name()) is not None

    def page() -> None:
        assert catalogue.records(Page(limit=50, after=name()))

    yield _told("look-up", look, NUM_LOOKS)
    yield _told("look-up of nobody", lambda: catalogue.find("nobody"), NUM_LOOKS)

    def labelled() -> None:
        team = chance.randrange(max(1, num_voices // 1000))
        assert catalogue.records(Page(limit=50, labels={"team": f"team {team}"}))

    yield _told("page of 50", page, NUM_LOOKS // 10)
    yield _told("page of 50 of a thousand with a label", labelled, NUM_LOOKS // 10)


def _told(what: str, call: Callable[[], Any], num_calls: int) -> str:
    times = []
    for _ in range(num_calls):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    cuts = statistics.quantiles(times, n=100)
    return f"{what}: p50 {cuts[49]:.3f} ms, p99 {cuts[98]:.3f} ms"


def _size(catalogue: Catalogue) -> int:
    with catalogue.database.read() as db:
        if is_postgres(db):
            size = text("SELECT pg_database_size(current_database())")
            return db.execute(size).scalar_one()
    return catalogue.path.stat().st_size


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    from tests.postgres import running

    with running() as server:
        yield server.make("measured")


if __name__ == "__main__":
    main()
