"""A PostgreSQL server of the tests' own, and a database for each directory of voices.

Debian's (`make postgres` installs it), as an unprivileged user, on a Unix socket in a
temporary directory. Its default order of texts is a language's, as in real databases.
"""

import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg import sql

from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.postgres import PostgresServer

TEMPLATE = "an_empty_catalogue"
START_SECONDS = 60
# A process of the server may see late that its connection was closed.
END_SECONDS = 10
TABLES = [*reversed(schema.metadata.sorted_tables), *schema.on_server.sorted_tables]
SEQUENCES = "SELECT setval(oid::regclass, 1, false) FROM pg_class WHERE relkind = 'S'"
_STATEMENTS = """
SELECT left(query, 60) FROM pg_stat_activity
WHERE datname = %s AND backend_type = 'client backend'"""
# In the order of their references; the version stays, or is put right.
_EMPTY = ";".join(
    [f"DELETE FROM {table}" for table in TABLES if table is not schema.schema_version]
    + [f"UPDATE schema_version SET version = {schema.VERSION}", SEQUENCES]
)


class Server:
    """One server; `start` and `stop` may be called again and again."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.process: subprocess.Popen[Any] | None = None  # it is stopped
        self._given, self._free = directory / "given", directory / "free"
        self._given.mkdir()
        self._free.mkdir()
        # It refuses to run as root.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(directory, "postgres", "postgres")
            self._user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        self._run("initdb", "-D", "data", "-U", "tests", "-A", "trust", "-N", "-E")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.directory),
            "fsync": "off",
            "max_connections": "300",
            "shared_buffers": "64MB",
            "log_min_messages": "fatal",
        }
        given = [part for n, v in settings.items() for part in ("-c", f"{n}={v}")]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [_program("postgres"), "-D", "data", *given],
                cwd=self.directory,
                stdout=subprocess.DEVNULL,
                stderr=log,
                **self._user,
            )
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                self.query("SELECT 1")
            except psycopg.OperationalError:
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < until, self.log()
                time.sleep(0.05)
            else:
                return

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stop it: with SIGINT it ends its connections, with SIGQUIT it drops all."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(START_SECONDS)
            self.process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Neither it nor its processes do anything; their sockets stay open."""
        assert self.process is not None
        group = self._family()
        try:
            for pid in group:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in group:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def url(self, database: str = "postgres") -> str:
        """Of a database, with a password in it, which trust does not ask for."""
        return f"postgresql://tests:s3cret@/{database}?host={self.directory}"

    def url_of(self, directory: Path) -> str:
        """Of the database that goes with a directory of voices, in any process."""
        hashed = hashlib.sha256(str(directory).encode()).hexdigest()
        link = self._given / hashed
        while not link.is_symlink():
            name = self._a_free_one()
            try:
                link.symlink_to(name)
            except FileExistsError:  # given by another process
                (self._free / name).touch()
        return self.url(str(link.readlink()))

    def tidy(self) -> None:
        """Empty the databases of directories, for other ones: making one takes long."""
        left = {}
        for link in list(self._given.iterdir()):
            name = str(link.readlink())
            left[name] = self._left(name)
            self.cut(name)
            self.query(_EMPTY, database=name)
            link.unlink()
            if not left[name]:  # else what is left would disturb the next test
                (self._free / name).touch()
        assert not any(left.values()), f"connections are left: {left}"

    def _left(self, database: str) -> list[str]:
        """The last statements of connections that do not end."""
        until = time.monotonic() + END_SECONDS
        while left := self.query(_STATEMENTS, database):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return left

    def _a_free_one(self) -> str:
        for path in self._free.iterdir():
            with suppress(FileNotFoundError):  # another process takes it
                path.unlink()
                return path.name
        name = f"voices_{secrets.token_hex(8)}"
        self.make(name, TEMPLATE)
        return name

    def make_template(self) -> None:
        """Make the database that others are copied of: a catalogue, migrated."""
        database = Database(PostgresServer(self.make(TEMPLATE)), self._free)
        database.prepare()
        database.close()

    def make(self, name: str, template: str = "template0") -> str:
        """Make a database unless it is there; returns its URL."""
        make = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(template)
        )
        # Of processes that do it at once one is the first.
        with suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
            self.query(make)
        return self.url(name)

    def query(self, query: Any, *arguments: Any, database: str = "postgres") -> Any:
        """Run a statement; returns its first column."""
        with psycopg.connect(self.url(database), autocommit=True) as db:
            cursor = db.execute(query, arguments or None)
            return [row[0] for row in cursor] if cursor.description else None

    def cut(self, database: str | None = None) -> int:
        """End all connections to a database, or to all; returns how many."""
        ended = self.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE"
            " pid <> pg_backend_pid() AND backend_type = 'client backend'"
            " AND datname = coalesce(%s, datname)",
            database,
        )
        return len(ended)

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def _run(self, program: str, *arguments: str) -> None:
        encoding = ["UTF8", "--locale-provider=icu", "--icu-locale=en-US", "--locale=C"]
        subprocess.run(
            [_program(program), *arguments, *encoding],
            cwd=self.directory,
            check=True,
            capture_output=True,
            **self._user,
        )

    def _family(self) -> list[int]:
        assert self.process is not None
        server = psutil.Process(self.process.pid)
        return [server.pid, *(child.pid for child in server.children())]


@contextmanager
def running() -> Iterator[Server]:
    """A server, in a directory that goes with it."""
    directory = Path(tempfile.mkdtemp(prefix="tts-cache-pg-"))
    try:
        server = Server(directory)
        server.start()
        try:
            server.make_template()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _program(name: str) -> str:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    if found:
        return str(found[-1])
    there = shutil.which(name)
    assert there is not None, "PostgreSQL is not installed: make postgres"
    return there
