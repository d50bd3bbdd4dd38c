"""Ensure: the one way an encoding comes to be, seen from the API process."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_tts_cache.entrypoints.executors import BoundedExecutor, Lookups
from vllm_tts_cache.entrypoints.poller import EncodePoller
from vllm_tts_cache.entrypoints.status import CacheStatus, StatusLooks, status_of
from vllm_tts_cache.entrypoints.wants import GoneError, Want, too_long_in_line
from vllm_tts_cache.errors import EncodeError, StorageError, WorkerRPCError
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.speaker.rpc_client import (
    DESCRIBE,
    ENCODING,
    FAILED,
    AsyncWorkers,
    ForeignStoreError,
    encoding_of,
    fingerprints_of,
    refuse_elsewhere,
)
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.throttled_log import ThrottledLog

logger = logging.getLogger("vllm.vllm_tts_cache")
throttled = ThrottledLog(logger)

# Of those that are not kept the worker is asked once more.
MAX_FETCHED = 100_000
# Times the timeout, which is that of one encode: a request that others are always
# encoded before is to hear of it while its client still listens.
MAX_TIMEOUTS_IN_LINE = 5
MAX_READS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingNeed:
    """What a mode needs of one reference audio."""

    ref: SpeakerRef
    encoder_names: tuple[str, ...]


class Ensurer:
    """Makes encodings exist: one want per encoding, however many callers wait for it.

    For the event loop only.

    Args:
        timeout_seconds: Longest encode, and longest time without any progress of the
            worker, that a caller waits for. A request waits five times as long in all.
        max_waiting_inline: Inline encodings that callers of this process may wait for
            at once.
    """

    def __init__(
        self,
        workers: AsyncWorkers,
        store: SpeakerStore,
        lookups: Lookups,
        *,
        timeout_seconds: float,
        max_waiting_inline: int,
    ):
        self._workers = workers
        self._store = store
        self._lookups = lookups
        self._poller = EncodePoller(
            workers,
            store,
            lookups,
            timeout_seconds=timeout_seconds,
            max_waiting_inline=max_waiting_inline,
        )
        self._max_wait_seconds = MAX_TIMEOUTS_IN_LINE * timeout_seconds
        self._fingerprints: dict[str, str] | None = None
        self._has_complained = False
        self._reads = BoundedExecutor(
            "too many encodings are read", num_threads=4, max_waiting=MAX_READS
        )
        self._looks = StatusLooks(workers)
        self._doubted: set[str] = set()
        # Of an object store's: audio -> encoders whose encoding the worker has fetched.
        self._fetched: OrderedDict[str, set[str]] = OrderedDict()

    @property
    def num_flights(self) -> int:
        """Encodings that callers of this process wait for."""
        return len(self._poller)

    @property
    def is_full(self) -> bool:
        """Whether one more inline reference would be refused."""
        return self._poller.is_full

    async def fingerprints(self) -> dict[str, str]:
        """Encoder name -> fingerprint, asked of the workers once.

        Raises: WorkerRPCError if they cannot say, do not agree, or read elsewhere.
        """
        if self._fingerprints is None:
            answers = await self._workers.call(DESCRIBE)
            refuse_elsewhere(answers, self._store.home)
            self._fingerprints = fingerprints_of(answers)
        return self._fingerprints

    @property
    def is_introduced(self) -> bool:
        """Whether the workers have said which encoders they have."""
        return self._fingerprints is not None

    async def introduce(self) -> None:
        """Ask before anybody needs it; log at once if the workers read elsewhere."""
        try:
            await self.fingerprints()
        except ForeignStoreError as exc:
            if not self._has_complained:
                logger.error("%s", exc)
            self._has_complained = True
        except WorkerRPCError as exc:  # it may not be served yet
            logger.debug("At start: %s", exc)

    async def keys(self, need: EncodingNeed) -> list[EncodingKey]:
        """Return the keys under which the workers' encoders keep the encodings.

        Raises: As `fingerprints`.
        """
        fingerprints = await self.fingerprints()
        return [
            EncodingKey(
                audio_sha256=need.ref.audio_sha256,
                encoder_fingerprint=fingerprints[name],
            )
            for name in need.encoder_names
        ]

    async def ensure(
        self,
        need: EncodingNeed,
        *,
        stored: frozenset[str] | None = None,
        urgent: bool = True,
        force: bool = False,
    ) -> bool:
        """Return when the worker can have the encodings; True if they existed.

        A caller that leaves withdraws what nobody else waits for.

        Args:
            need: Which encodings.
            stored: Fingerprints of the audio's encodings that are stored, if the
                caller has looked that up; None to look it up.
            urgent: Whether a request waits.
            force: Encode anew what exists; whoever uses it keeps it until then.

        Raises:
            AudioGoneError: The audio is not stored (any more).
            EncodeError: An encoder failed; the next call tries again.
            EncodeTimeoutError: It took too long; it may still be under way.
            ServerBusyError: Too many inline references wait, or a request has waited
                for too long although others are encoded.
            WorkerRPCError: The workers could not be asked.
        """
        keys = dict(zip(await self.keys(need), need.encoder_names, strict=True))
        sha = need.ref.audio_sha256
        missing, absent = list(keys), list(keys)
        if not force:
            missing = await self._missing(keys, sha, stored)
            absent = [key for key in keys if key in missing or not self._is_here(key)]
        if not absent:
            return True
        wanted = {key: keys[key] for key in absent}
        await self._wait(wanted, need.ref, urgent=urgent, force=force)
        self._doubted.discard(sha)
        self._note_here(wanted)
        return not missing

    def doubt(self, audio_sha256: str) -> None:
        """Let the worker look at this audio's files once more: a prompt was missing."""
        self._doubted.add(audio_sha256)

    def delete(self, audio_sha256: str) -> None:
        """Doubt it no longer: it was deleted."""
        self._doubted.discard(audio_sha256)
        self._fetched.pop(audio_sha256, None)

    def end_waits(self, audio_sha256: str) -> None:
        """Tell who waits for this audio's encodings that it is not stored any more."""
        for fingerprint in (self._fingerprints or {}).values():
            key = EncodingKey(
                audio_sha256=audio_sha256, encoder_fingerprint=fingerprint
            )
            self._poller.end(key)

    def _is_here(self, key: EncodingKey) -> bool:
        """Whether the worker has had what is stored: a directory's it has."""
        if not self._store.blobs.is_remote:
            return True
        return key.encoder_fingerprint in self._fetched.get(key.audio_sha256, ())

    def _note_here(self, keys: Iterable[EncodingKey]) -> None:
        if not self._store.blobs.is_remote:
            return
        for key in keys:
            had = self._fetched.setdefault(key.audio_sha256, set())
            had.add(key.encoder_fingerprint)
            self._fetched.move_to_end(key.audio_sha256)
        while len(self._fetched) > MAX_FETCHED:
            self._fetched.popitem(last=False)

    def delete_all(self) -> None:
        """Doubt none any longer, and know of none that a worker has it."""
        self._doubted.clear()
        self._fetched.clear()

    async def status(
        self, need: EncodingNeed, stored: frozenset[str]
    ) -> tuple[CacheStatus, str | None]:
        """Derive the status and, of ``failed``, the reason.

        Args:
            need: Which encodings.
            stored: Fingerprints of the audio's encodings that are stored.
        """
        named = zip(await self.keys(need), need.encoder_names, strict=True)
        missing = {k: n for k, n in named if k.encoder_fingerprint not in stored}
        if not missing:
            return "ready", None
        if any(key in self._poller for key in missing):
            return "processing", None
        return status_of(await self._looks.look(need.ref, missing.values()))

    async def encoding(self, key: EncodingKey, encoder_name: str) -> Encoding:
        """Return an encoding that `ensure` has made sure of.

        Raises:
            GoneError: It is gone again, or the worker's copy is damaged.
            ServerBusyError: Too many are read.
            WorkerRPCError: The workers could not be asked.
        """
        if (found := await self._reads.run(self._read, key)) is not None:
            return found
        # The disk did not take it, or does not give it: that costs time only.
        call = wire.EncodingCall(audio_sha256=key.audio_sha256, encoder=encoder_name)
        answers = await self._workers.call(ENCODING, call)
        try:
            return encoding_of(answers, key)
        except EncodeError as exc:
            if await self._lookups.run(self._store.has_audio, key.audio_sha256):
                self.doubt(key.audio_sha256)
            raise GoneError(str(exc)) from exc

    async def cause_of_failure(self, request_id: str) -> str | None:
        """Return why the engine ended a request, if it was for want of its prompt."""
        call = wire.FailedCall(request_ids=[request_id])
        try:
            answers = await self._workers.call(FAILED, call)
        except WorkerRPCError as exc:
            throttled.warn_of("asking for causes", "Asking why it failed: %s", exc)
            return None
        causes = (answer.causes.get(request_id) for answer in answers)  # not its alone
        return next(filter(None, causes), None)

    def shutdown(self) -> None:
        """Stop asking.

        Whoever waits, or comes later, is told that the server is busy.
        """
        self._poller.shutdown()
        self._reads.shutdown()

    def _read(self, key: EncodingKey) -> Encoding | None:
        try:
            return self._store.read(key)
        except StorageError as exc:
            throttled.warn_of("reading an encoding", "%s", exc.log_text)
            return None

    async def _missing(
        self,
        keys: Iterable[EncodingKey],
        audio_sha256: str,
        stored: frozenset[str] | None,
    ) -> list[EncodingKey]:
        if audio_sha256 in self._doubted:
            return list(keys)
        if stored is None:
            look = self._store.stored_kinds
            stored = (await self._lookups.run(look, [audio_sha256]))[audio_sha256]
        return [key for key in keys if key.encoder_fingerprint not in stored]

    async def _wait(
        self,
        keys: Mapping[EncodingKey, str],
        ref: SpeakerRef,
        *,
        urgent: bool,
        force: bool,
    ) -> None:
        wants: list[Want] = []
        # What exists is made anew in its turn: anybody may ask for that, of any voice.
        goes_first = urgent and not force
        try:
            for key, encoder in keys.items():
                want = self._poller.join(
                    key,
                    encoder,
                    ref.segment,
                    urgent=goes_first,
                    force=force,
                    # What is stored elsewhere is the worker's to fetch.
                    is_doubted=self._store.blobs.is_remote
                    or ref.audio_sha256 in self._doubted,
                )
                wants.append(want)
            await self._landed(wants, self._max_wait_seconds if urgent else None)
        finally:
            for want in wants:
                self._poller.leave(want, urgent=goes_first)

    @staticmethod
    async def _landed(wants: Sequence[Want], max_seconds: float | None) -> None:
        # It cancels none of them: others wait for them too.
        landings = [want.landed for want in wants]
        first = asyncio.FIRST_EXCEPTION
        await asyncio.wait(landings, timeout=max_seconds, return_when=first)
        done = [landed for landed in landings if landed.done()]
        for landed in done:
            landed.result()
        if max_seconds is not None and len(done) < len(landings):
            raise too_long_in_line(max_seconds)
