"""The machines of the simulated fleet: servers, replicas, PostgreSQL and a bucket.

A server is a process with the real `SpeakerService`, as an API process has it without
HTTP. A replica is a process with the real `WorkerEncodings`, as a worker has it without
a model. Each has a directory and a clock of its own. All servers share all replicas, as
the API processes of one deployment do. Processes talk in JSON and MessagePack.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio, Segment
from vllm_tts_cache.catalogue.records import NewSpeaker, SpeakerChanges
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers import deletions
from vllm_tts_cache.entrypoints.speakers.served_model import ServedModel
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.errors import EncodeError, GoneError, TTSCacheError
from vllm_tts_cache.model_executor import speakers as worker_module
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.family import Family, Mode, Transcript
from vllm_tts_cache.speaker.reference import MemoryNeed, SpeakerRef
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.tenants import ALONE, Tenant

RATE_HZ, NUM_SAMPLES = 24_000, 2_000
ENCODER = "heard"
FINGERPRINT = hashlib.sha256(ENCODER.encode()).hexdigest()
FAMILY = Family(
    name="simulated",
    short_name="simulated",
    title="A simulated model",
    modes=(Mode(name="clone", encoders=(ENCODER,), transcript=Transcript.UNUSED),),
    recognises=lambda _: False,
    adapter="",
    sample_rate_hz=RATE_HZ,
)
MAX_TRIES = 3  # of a request whose prompt was missing, as the serving class has it
START_SECONDS = 120.0
READY = 0  # the id of a machine's first message
# Whether the last row of a name answered the look-up of the request under way.
_by_last_row: ContextVar[bool] = ContextVar("_by_last_row", default=False)
_processes = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Have the processes of machines forked from one that has imported all of this."""
    _processes.set_forkserver_preload(["__main__", __name__])


@cache
def clip(number: int) -> ReferenceAudio:
    """The clip of a number; no two are equal."""
    noise = np.random.default_rng(number).uniform(-0.5, 0.5, NUM_SAMPLES)
    return ReferenceAudio.of(noise.astype(np.float32), RATE_HZ)


def heard_in(audio: ReferenceAudio) -> bytes:
    """What the simulated encoder makes of a clip: a digest of its samples."""
    return hashlib.sha256(audio.samples.tobytes()).digest()


class HeardEncoder:
    """A reference encoder without a network: ``heard``, ``(32,)`` uint8."""

    name, fingerprint, need = ENCODER, FINGERPRINT, MemoryNeed()

    def __init__(self, note: Callable[..., None]):
        self._note = note

    def encode(self, audio: ReferenceAudio) -> Encoding:
        self._note("encode", audio.audio_sha256)
        time.sleep(random.uniform(0.002, 0.02))
        return Encoding({ENCODER: np.frombuffer(heard_in(audio), np.uint8)})


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a process of a machine is started with."""

    directory: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    sockets: tuple[str, ...]
    seed: int
    recovery_seconds: float

    def opened_settings(self) -> Settings:
        return Settings(samples_dir=Path(self.directory) / "voices", **self.settings)


def set_clock(ahead_seconds: float) -> None:
    """Set this process's wall clock so far ahead of the real one."""
    time.time = lambda: time.clock_gettime(time.CLOCK_REALTIME) + ahead_seconds
    ahead_ns = int(ahead_seconds * 1e9)
    time.time_ns = lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) + ahead_ns


def run(kind: str, connection: Connection, given: Given) -> None:
    """Be a server or a replica until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(given.environment)
    random.seed(given.seed)
    deletions.RECOVERY_SECONDS = given.recovery_seconds
    Path(given.directory).mkdir(exist_ok=True)
    logging.basicConfig(filename=f"{given.directory}/log", level=logging.WARNING)
    logging.getLogger("vllm").propagate = True
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):
        asyncio.run(
            _serve({"server": Server, "replica": Replica}[kind], connection, given)
        )
    os._exit(0)  # threads may wait for a database that is gone


async def _serve(kind: Any, connection: Connection, given: Given) -> None:
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    ended: asyncio.Future[None] = loop.create_future()
    try:
        machine = kind(given)
        await machine.start()
    except TTSCacheError as exc:
        connection.send_bytes(_json(id=READY, error=f"{type(exc).__name__}: {exc}"))
        return

    async def answer(id_: int, what: str, fields: dict[str, Any]) -> None:
        began = time.perf_counter()
        try:
            found = await getattr(machine, what)(**fields)
        except TTSCacheError as exc:
            status = int(exc.http_status)
            found = {"error": type(exc).__name__, "status": status, "why": str(exc)}
        except Exception as exc:  # noqa: BLE001  the schedule counts it as a fault
            why = "".join(traceback.format_exception(exc)[-4:])
            found = {"error": f"unexpected {type(exc).__name__}", "why": why}
        took_ms = 1e3 * (time.perf_counter() - began)
        connection.send_bytes(_json(**{"id": id_, "ms": took_ms, **(found or {})}))

    def receive() -> None:
        try:
            call = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            ended.set_result(None)
            return
        task = loop.create_task(answer(call.pop("id"), call.pop("what"), call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), receive)
    connection.send_bytes(_json(id=READY))
    await ended


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


class Engine:
    """The host's engine client: calls a method of all replicas that are alive."""

    errored = False

    def __init__(self, sockets: tuple[str, ...]):
        self._sockets = sockets

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        stage_ids: list[int] | None = None,
    ) -> list[Any]:
        del timeout, kwargs, stage_ids
        answers = await asyncio.gather(
            *(self.ask(s, method, *args) for s in self._sockets)
        )
        return [[answer] for answer in answers if answer is not None]

    async def ask(self, socket: str, method: str, *args: bytes | str) -> bytes | None:
        """Return a replica's answer; None if the host has given the replica up."""
        try:
            reader, writer = await asyncio.open_unix_connection(socket)
        except OSError:
            return None
        try:
            writer.write(msgspec.msgpack.encode([method, *args]))
            writer.write_eof()
            return await reader.read() or None
        except OSError:
            return None
        finally:
            writer.close()

    async def prompt(self, audio_sha256: str) -> str:
        """Return what one replica speaks from. Raises: EncodeError."""
        for socket in random.sample(self._sockets, len(self._sockets)):
            answer = await self.ask(socket, "prompt", audio_sha256)
            if answer is not None:
                found = json.loads(answer)
                if "heard" not in found:
                    raise EncodeError(found["missing"])
                return found["heard"]
        raise EncodeError("no replica is alive")


class Server:
    """An API process: what its routes and adapters do, asked by the schedule."""

    def __init__(self, given: Given):
        self._engine = Engine(given.sockets)
        model = ServedModel(
            family=lambda: FAMILY, refusal=lambda: None, note=lambda: ""
        )
        self._service = SpeakerService(given.opened_settings(), self._engine, model)
        self._store = self._service.store
        last = self._service.lookups.last
        find_last = last.find

        def find(tenant: str, name: str, now: float) -> Any:
            found = find_last(tenant, name, now)
            _by_last_row.set(found is not None)
            return found

        last.find = find

    async def start(self) -> None:
        self._service.start()

    async def speak(self, name: str) -> dict[str, Any]:
        """Speak a voice, as the serving class and its adapter do.

        ``sha`` and ``text`` are those of the row that was found; ``sha`` is None if
        there is no voice.
        """
        service = self._service
        for is_last in (False,) * (MAX_TRIES - 1) + (True,):
            found = await self.find(name)
            if found["sha"] is None:
                return found
            ref = SpeakerRef(audio_sha256=found["sha"], segment=Segment.REGISTERED)
            stored = found.pop("stored")
            try:
                need = service.model.need_of(stored.record)
                existed = await service.encodings.ensure(
                    need, tenant=ALONE.name, stored=stored.fingerprints
                )
                heard = await self._engine.prompt(ref.audio_sha256)
            except (EncodeError, GoneError):
                if is_last:
                    raise
                service.encodings.recheck(ref.audio_sha256)
            else:
                return {**found, "heard": heard, "is_hit": existed}
        raise AssertionError

    async def find(self, name: str, tenant: str = ALONE.name) -> dict[str, Any]:
        _by_last_row.set(False)
        began = time.perf_counter()
        found = await self._service.lookups.find_to_speak(Tenant(name=tenant), name)
        fields = {
            "find_ms": 1e3 * (time.perf_counter() - began),
            "is_last_row": _by_last_row.get(),
        }
        if found is None:
            return {"sha": None, "text": None, **fields}
        record = found.record
        shown = {"sha": record.audio_sha256, "text": record.ref_text}
        return {**shown, **fields, "stored": found}

    async def look(self, name: str, tenant: str) -> dict[str, Any]:
        found = await self.find(name, tenant)
        found.pop("stored", None)
        return found

    async def audio(self, name: str) -> dict[str, Any]:
        """Read the reference audio, as the route that sends it does."""
        found = await self.find(name)
        found.pop("stored", None)
        if (sha := found["sha"]) is not None:
            read = self._store.read_audio
            audio = await self._service.lookups.reads.run(read, sha)
            found["heard"] = None if audio is None else heard_in(audio).hex()
        return found

    async def register(self, name: str, number: int, text: str | None) -> None:
        audio = clip(number)
        new = NewSpeaker(
            name=name,
            consent="given",
            audio_sha256=audio.audio_sha256,
            num_samples=audio.num_samples,
            sample_rate_hz=RATE_HZ,
            ref_text=text,
        )
        register = self._store.registrations.register
        done = await asyncio.to_thread(register, new, DecodedAudio(audio, ()))
        self._service.registered(done)

    async def change(self, name: str, given: dict[str, Any]) -> None:
        await self._service.change(ALONE, name, SpeakerChanges(given))

    async def delete(self, name: str) -> None:
        await self._service.deletions.delete(name, ALONE.name)

    async def set_clock(self, ahead_seconds: float) -> None:
        set_clock(ahead_seconds)

    async def holds(self, sha: str) -> dict[str, Any]:
        """Whether this server could speak the audio by a last row."""
        rows = self._service.lookups.last._rows.values()
        return {"is_held": any(row.record.audio_sha256 == sha for row in rows)}

    async def recover(self) -> None:
        await asyncio.to_thread(self._store.recover)

    async def memory(self) -> dict[str, Any]:
        return {"rss": _rss_bytes(), "is_recovering": is_recovering()}


class Replica:
    """A worker: its RPC on a socket, and a note of each turn, encode and publishing."""

    def __init__(self, given: Given):
        self._log = os.open(
            f"{given.directory}/encodes", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        (self._socket,) = given.sockets
        self._noted_by_module()
        self._speakers = worker_module.WorkerEncodings(
            {ENCODER: HeardEncoder(self.note)},
            given.opened_settings(),
            torch.device("cpu"),
        )

    async def start(self) -> None:
        Path(self._socket).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._answer, self._socket)

    def note(self, what: str, audio_sha256: str, result: str = "") -> None:
        """Write a line that outlives this process."""
        line = [time.monotonic(), os.getpid(), what, audio_sha256, result]
        os.write(self._log, json.dumps(line).encode() + b"\n")

    async def set_clock(self, ahead_seconds: float) -> None:
        set_clock(ahead_seconds)

    async def holds(self, sha: str) -> dict[str, Any]:
        """Whether this worker's memory, or its copies, have an audio's encoding."""
        found = self._speakers.encoding(wire.EncodingCall(sha, FINGERPRINT))
        return {"is_held": found.encoding is not None}

    async def recover(self) -> None:
        await asyncio.to_thread(self._store.recover_copies)

    async def memory(self) -> dict[str, Any]:
        return {"rss": _rss_bytes(), "is_recovering": is_recovering()}

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        method, *args = msgspec.msgpack.decode(await reader.read())
        try:
            answer = getattr(self, method)(*args)
        except Exception as exc:  # noqa: BLE001  as the RPC's methods do
            answer = wire.Failed(reason=str(exc) or repr(exc))
        is_bytes = isinstance(answer, bytes)
        with contextlib.suppress(OSError):
            writer.write(answer if is_bytes else wire.encode(answer))
            await writer.drain()
        writer.close()

    def prompt(self, audio_sha256: str) -> bytes:
        ref = SpeakerRef(audio_sha256=audio_sha256, segment=Segment.REGISTERED)
        try:
            found = self._speakers.prompt(ref, [ENCODER])
        except EncodeError as exc:
            return _json(missing=str(exc))
        return _json(heard=found[ENCODER][ENCODER].tobytes().hex())

    # What follows answers as `model_executor.rpc_methods`, which imports the host.

    def tts_cache_describe(self, _call: bytes) -> wire.Described:
        speakers = self._speakers
        return wire.Described(
            0, speakers.fingerprints, speakers.store_id.id, speakers.store_id.place
        )

    def tts_cache_want(self, call: bytes) -> wire.WantAnswer:
        return self._speakers.queue.want(
            msgspec.msgpack.decode(call, type=wire.WantCall), 0
        )

    def tts_cache_delete(self, call: bytes) -> wire.Deleted:
        deletion = msgspec.msgpack.decode(call, type=wire.DeleteCall)
        if deletion.everything:
            return self._speakers.delete_all()
        return self._speakers.delete(deletion.audio_sha256s)

    def tts_cache_failed(self, call: bytes) -> wire.FailedPrompts:
        del call
        return wire.FailedPrompts(causes={})

    def tts_cache_stats(self) -> wire.WorkerStats:
        return wire.WorkerStats(0, self._speakers.stats(), self._speakers.worker_id)

    def _noted_by_module(self) -> None:
        """Have the worker open a store and turns that note what they do."""
        note, open_turns = self.note, worker_module.open_turns

        def noted(what: str, act: Callable[..., Any]) -> Callable[..., Any]:
            def noting(key: Any, *rest: Any) -> Any:
                try:
                    result = act(key, *rest)
                except TTSCacheError as exc:
                    note(what, key.audio_sha256, type(exc).__name__)
                    raise
                shown = "no" if result is None or result is False else "yes"
                note(what, key.audio_sha256, shown)
                return result

            return noting

        def store_that_notes(settings: Settings, **how: Any) -> Any:
            self._store = store = open_store(settings, **how)
            store.read = noted("read", store.read)
            store.writer.publish = noted("publish", store.writer.publish)
            return store

        def turns_that_note(settings: Settings, database: Any) -> Any:
            turns = open_turns(settings, database)
            held = turns.turn

            @contextlib.contextmanager
            def turn(key: Any) -> Generator[bool, None, None]:
                with held(key) as is_mine:
                    note("turn", key.audio_sha256, "yes" if is_mine else "no")
                    yield is_mine

            turns.turn = turn
            return turns

        worker_module.open_store = store_that_notes
        worker_module.open_turns = turns_that_note


def is_recovering() -> bool:
    """Whether a recovery goes through the store in this process."""
    return any(t.name == "tts-cache-recover" for t in threading.enumerate())


def _rss_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class MachineGoneError(Exception):
    """The machine was killed, or is not up."""


@dataclass(eq=False)
class Machine:
    """A machine as the schedule sees it; for its event loop only.

    Attributes:
        since: When it was started last, in monotonic seconds.
        is_frozen: Whether its process is stopped.
    """

    kind: str
    name: str
    given: Given
    is_up: bool = False
    is_frozen: bool = False
    since: float = 0.0
    num_starts: int = 0
    _pid: int = 0
    _ids: int = READY
    _waiting: dict[int, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)

    @property
    def voices(self) -> Path:
        return Path(self.given.directory) / "voices"

    async def start(self) -> str:
        """Start it; return why it refuses, empty if it does not."""
        ours, its = _processes.Pipe()
        process = _processes.Process(
            target=run, args=(self.kind, its, self.given), daemon=True
        )
        process.start()
        its.close()
        self._pid, self._connection = process.pid or 0, ours
        loop = asyncio.get_running_loop()
        ready = self._waiting[READY] = loop.create_future()
        loop.add_reader(ours.fileno(), self._receive, ours)
        answer = await asyncio.wait_for(ready, START_SECONDS)
        self.is_up, self.since = "error" not in answer, time.monotonic()
        self.num_starts += 1
        return answer.get("error", "")

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Ask its process. Raises: MachineGoneError: It is killed meanwhile."""
        if not self.is_up:
            raise MachineGoneError(self.name)
        self._ids += 1
        number = self._ids
        answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._connection.send_bytes(_json(id=number, what=what, **fields))
        if (found := await answer).get("error") == "killed":
            raise MachineGoneError(self.name)
        return found

    def kill(self) -> None:
        self.is_up = False
        os.kill(self._pid, signal.SIGKILL)

    def freeze(self) -> None:
        self.is_frozen = True
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        self.is_frozen = False
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> None:
        self.is_up = False
        self._connection.close()

    def _receive(self, connection: Connection) -> None:
        try:
            answer = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(connection.fileno())
            connection.close()
            if connection is not self._connection:  # it was started again
                return
            self.is_up = False
            for future in self._waiting.values():
                if not future.done():
                    future.set_result({"error": "killed"})
            self._waiting.clear()
            return
        future = self._waiting.pop(answer["id"], None)
        if future is not None and not future.done():
            future.set_result(answer)
