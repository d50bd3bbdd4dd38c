"""Ensuring for tenants: what is there for all is told to whoever asked for it before.

Encodings are shared by content. That one is there says that somebody had this clip, so
a tenant who brings it for the first time is answered as if nobody had: `miss`,
`pending`. It still waits for nothing, as nothing is encoded twice.
"""

import logging
from collections.abc import Callable, Iterable

from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.entrypoints.ensure import EncodingNeed, Ensurer
from vllm_tts_cache.entrypoints.executors import BoundedExecutor, Lookups
from vllm_tts_cache.entrypoints.status import CacheStatus
from vllm_tts_cache.errors import ServerBusyError, StorageError
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

MAX_WAITING = 1024

Note = Callable[[str, str, Iterable[str], Segment], None]


class ToldEnsurer:
    """As `Ensurer`, for one tenant of several; for the event loop only."""

    def __init__(self, store: SpeakerStore, lookups: Lookups):
        self._store = store
        self._lookups = lookups
        self._notes = BoundedExecutor(
            "too many notes wait", num_threads=1, max_waiting=MAX_WAITING
        )

    async def ensure(
        self,
        ensurer: Ensurer,
        tenant: str,
        need: EncodingNeed,
        *,
        told: frozenset[str] | None = None,
        urgent: bool = True,
        force: bool = False,
    ) -> bool:
        """Return when the encodings exist; True if the tenant had been told so.

        Args:
            ensurer: Makes them.
            tenant: Who asks.
            need: Which encodings.
            told: Fingerprints of those that are there and that the tenant was told
                of, if the caller has looked that up; None to look it up.
            urgent: As of `Ensurer.ensure`.
            force: As of `Ensurer.ensure`.

        Raises: As `Ensurer.ensure`.
        """
        sha = need.ref.audio_sha256
        if told is None:
            told = await self._lookups.run(self._store.told, tenant, sha)
        new = await self._fingerprints(ensurer, need) - told
        if new:
            await self._note(self._store.ask, tenant, need, new)
        existed = await ensurer.ensure(need, stored=told, urgent=urgent, force=force)
        if new:
            await self._note(self._store.tell, tenant, need, new)
        return existed

    async def status(
        self, ensurer: Ensurer, tenant: str, need: EncodingNeed, told: frozenset[str]
    ) -> tuple[CacheStatus, str | None]:
        """Derive the status and, of ``failed``, the reason, as the tenant may know it.

        Raises: WorkerRPCError, StorageError.
        """
        if missing := await self._fingerprints(ensurer, need) - told:
            sha = need.ref.audio_sha256
            if missing - await self._lookups.run(self._store.asked, tenant, sha):
                return "pending", None  # whatever somebody else has asked for
        return await ensurer.status(need, told)

    def shutdown(self) -> None:
        """Stop the thread."""
        self._notes.shutdown()

    async def _fingerprints(self, ensurer: Ensurer, need: EncodingNeed) -> set[str]:
        return {key.encoder_fingerprint for key in await ensurer.keys(need)}

    async def _note(
        self, note: Note, tenant: str, need: EncodingNeed, kinds: set[str]
    ) -> None:
        sha, segment = need.ref.audio_sha256, need.ref.segment
        try:
            await self._notes.run(note, tenant, sha, kinds, segment)
        except (StorageError, ServerBusyError) as exc:
            # It is said again to be a miss, and costs nobody anything else.
            throttled.warn_of("noting", "Noting what was told: %s", exc.log_text)
