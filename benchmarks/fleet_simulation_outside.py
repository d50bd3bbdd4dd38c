"""What the simulated fleet shares, and how it fails: PostgreSQL and the bucket."""

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.fleet_simulation_machines import FINGERPRINT, NUM_SAMPLES, RATE_HZ
from tests import postgres
from tests.fault import faulty_proxy
from vllm_tts_cache.catalogue import owners, stored_files
from vllm_tts_cache.catalogue.database import Database as Catalogue
from vllm_tts_cache.catalogue.schema import encode_turn, lease, loose_object, renewals

DATABASE = "fleet"
NUM_TENANTS = 50
STREAMING_SECONDS = 60.0
# What the catalogue has as times of its server's clock, besides dates for people.
TIMES = (
    (lease, "until"),
    (renewals, "began_at"),
    (renewals, "last_at"),
    (encode_turn, "until"),
    (loose_object, "removable_from"),
)
_SPEAKERS = """
INSERT INTO speaker (generation, tenant, name_key, name, search_text, audio_sha256,
    num_samples, sample_rate_hz, ref_text, consent, created_at, speaker_id, precompute)
SELECT n, 'tenant-' || n %% %(tenants)s, 'filler ' || n, 'Filler ' || n, 'filler ' || n,
    encode(sha256(convert_to('filler ' || n, 'UTF8')), 'hex'), %(samples)s, %(rate)s,
    'What the voice ' || n || ' says.', 'given',
    date_part('epoch', clock_timestamp()), 'voice_' || lpad(to_hex(n), 32, '0'), 1
FROM generate_series(%(first)s::bigint, %(last)s::bigint) n"""
_FILES = """
INSERT INTO stored_file (audio_sha256, artifact, segment, is_audio, num_bytes, used_at,
    created_at, object_name, is_suspect)
SELECT sha, artifact, 'registered', is_audio, num_bytes, 0, 0,
    'objects/' || left(sha, 2) || '/' || sha || '/' || left(md5(sha || artifact), 32), 0
FROM (SELECT audio_sha256 sha FROM speaker WHERE tenant <> 'default'
    AND generation BETWEEN %(first)s AND %(last)s) s,
    (VALUES ('audio', 1, 8400), (%(encoder)s, 0, 400))
        f (artifact, is_audio, num_bytes)"""
_AT_ONCE = 50_000


def filler_name(number: int) -> tuple[str, str]:
    """Tenant and name of a voice that only the catalogue has."""
    return f"tenant-{number % NUM_TENANTS}", f"Filler {number}"


def reserve(databases: "Databases", num_voices: int) -> None:
    """Leave so many generations out: those that are registered now come later."""
    sequence = "pg_get_serial_sequence('speaker', 'generation')"
    databases.query("SELECT setval(" + sequence + ", %s)", num_voices + 1)


def fill(url: str, catalogue: Catalogue, num_voices: int) -> Iterator[int]:
    """Insert rows of voices with their files, and sum them up; yield how many so far.

    They get the generations that `reserve` left out.

    Their objects are not in the bucket: no request reads them.
    """
    given: dict[str, Any] = {
        "tenants": NUM_TENANTS,
        "samples": NUM_SAMPLES,
        "rate": RATE_HZ,
        "encoder": FINGERPRINT,
    }
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("SET synchronous_commit = off")
        for first in range(1, num_voices + 1, _AT_ONCE):
            last = min(first + _AT_ONCE - 1, num_voices)
            given["first"], given["last"] = first, last
            with db.transaction():
                db.execute(_SPEAKERS, given)
                db.execute(_FILES, given)
            if first == 1:
                # What servers ask four times a second would read all of a table that
                # was never analysed; autovacuum comes within a minute.
                db.execute("ANALYZE speaker, stored_file")
            yield last
        with catalogue.write_long() as turn:
            stored_files.repair_usage(turn)
            owners.recount(turn)
        db.execute("VACUUM ANALYZE")


class Node(postgres.Server):
    """A PostgreSQL server of two that take turns as primary and as standby."""

    def copy(self, primary: "Node") -> None:
        """Become a standby of the primary, from a copy of all it has; start it."""
        shutil.rmtree(self.directory / "data", ignore_errors=True)
        subprocess.run(
            [
                *(postgres._program("pg_basebackup"), "-D", "data", "-R"),
                *("-h", str(primary.directory), "-U", "tests", "-c", "fast"),
            ],
            cwd=self.directory,
            check=True,
            capture_output=True,
            **self._user,
        )
        self.start()


class Databases:
    """A primary and its standby, under one URL that leads to whichever may write.

    Every method waits: call it in a thread.

    Attributes:
        url: The catalogue's.
        has_standby: Whether the standby streams, and every commit waits for it.
    """

    def __init__(self, first: Path, second: Path):
        self.primary, self.standby = Node(first), Node(second)
        self.has_standby = False
        hosts = f"{first},{second}"
        self.url = (
            f"postgresql://tests:s3cret@/{DATABASE}?host={hosts}"
            "&target_session_attrs=read-write"
        )

    def start(self) -> None:
        self.primary.start()
        self.primary.make(DATABASE)

    def add_standby(self) -> None:
        """Copy the primary; from then on a commit is answered when both have it."""
        self._wait_for_standbys("")
        self.standby.copy(self.primary)
        until = time.monotonic() + STREAMING_SECONDS
        streaming = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"
        while not self.query(streaming):
            if time.monotonic() > until:
                raise TimeoutError(self.standby.log())
            time.sleep(0.1)
        self._wait_for_standbys("*")
        self.has_standby = True

    def restart(self) -> None:
        """Crash the primary, and start it again."""
        self.primary.stop(signal.SIGQUIT)
        self.primary.start()

    def leave_standby_behind(self) -> None:
        """Have commits wait for the standby no longer, and stop it."""
        self._wait_for_standbys("")
        self.standby.stop()

    def promote(self) -> None:
        """Crash the primary, and have the standby take its place as it is."""
        self.primary.stop(signal.SIGQUIT)
        self.has_standby = False
        if self.standby.process is None:
            self.standby.start()
        self.standby.query("SELECT pg_promote()")
        self.primary, self.standby = self.standby, self.primary
        until = time.monotonic() + STREAMING_SECONDS
        while self.primary.query("SELECT pg_is_in_recovery()") != [False]:
            if time.monotonic() > until:
                raise TimeoutError(self.primary.log())
            time.sleep(0.05)

    def cut(self) -> None:
        """End all connections of the fleet."""
        self.primary.cut(DATABASE)

    def set_clock(self, ahead_seconds: float) -> None:
        """Make every time in the catalogue look as after a change of its clock."""
        for table, column in TIMES:
            self.query(
                sql.SQL("UPDATE {table} SET {column} = {column} - %s").format(
                    table=sql.Identifier(table.name), column=sql.Identifier(column)
                ),
                ahead_seconds,
            )

    def query(self, query: Any, *arguments: Any) -> Any:
        """Run a statement; return its rows.

        Wait for a database that is down, or takes no more connections for a moment.
        """
        until = time.monotonic() + STREAMING_SECONDS
        while True:
            try:
                with psycopg.connect(self.primary.url(DATABASE), autocommit=True) as db:
                    cursor = db.execute(query, arguments or None)
                    return cursor.fetchall() if cursor.description else None
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def stop(self) -> None:
        for node in (self.standby, self.primary):
            node.stop(signal.SIGQUIT)

    def _wait_for_standbys(self, names: str) -> None:
        set_ = "ALTER SYSTEM SET synchronous_standby_names = {}"
        self.primary.query(sql.SQL(set_).format(sql.Literal(names)))
        self.primary.query("SELECT pg_reload_conf()")
        time.sleep(0.2)  # its processes read it on their own


@contextmanager
def running_databases() -> Iterator[Databases]:
    """Start a primary; both servers end, and their directories go, with the block."""
    with ExitStack() as ended:
        one, other = (
            Path(ended.enter_context(TemporaryDirectory(prefix="fleet-")))
            for _ in range(2)
        )
        made = Databases(one, other)
        ended.callback(made.stop)
        made.start()
        yield made


class BucketProxy(faulty_proxy.FaultyProxy):
    """Stands before the bucket, and speaks enough HTTP to answer in its place.

    Attributes:
        mode: ``whole``, ``refuse``, ``404``, ``503``, ``slow`` or ``flipped``. In each
            but the first, some of the connections behave so, and the others are whole.
        num_flipped: Bits that were flipped on their way to a machine.
    """

    FAULTY_SHARE = 0.7
    SLOW_SECONDS = 0.2, 1.5
    num_flipped = 0

    def _answer(self, client: socket.socket, mode: str) -> None:
        if mode != "whole" and self._chance.random() > self.FAULTY_SHARE:
            mode = "whole"
        with client, suppress(OSError):
            if mode in ("404", "503"):
                self._say(client, mode)
                return
            if mode == "flipped":
                with socket.create_connection(self._target) as server:
                    up = (client, server)
                    threading.Thread(target=faulty_proxy._pass, args=up).start()
                    self._pass_flipped(server, client)
                return
            if mode == "slow":
                time.sleep(self._chance.uniform(*self.SLOW_SECONDS))
                mode = "whole"
            super()._answer(client, mode)

    @staticmethod
    def _say(client: socket.socket, status: str) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            if not (data := client.recv(65536)):
                return
            request += data
        client.sendall(
            f"HTTP/1.1 {status} as the simulation wants it\r\n"
            "Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        # Reading what is left lets the client read the answer before the end.
        client.shutdown(socket.SHUT_WR)
        client.settimeout(1.0)
        while client.recv(65536):
            pass

    def _pass_flipped(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                begin = data.find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0
                if begin < len(data):
                    flipped = bytearray(data)
                    at = self._chance.randrange(begin, len(data))
                    flipped[at] ^= 1 << self._chance.randrange(8)
                    self.num_flipped += 1
                    data = bytes(flipped)
                client.sendall(data)
        for end in (server, client):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
