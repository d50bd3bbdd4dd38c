"""How far encodings are that nobody of this process waits for: the workers tell."""

import asyncio
import time
from collections.abc import Iterable
from typing import Literal

from vllm_tts_cache.entrypoints.poller import reports_of
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.speaker.rpc_client import WANT, AsyncWorkers
from vllm_tts_cache.speaker.wire import JobReport, JobState

CacheStatus = Literal["pending", "processing", "ready", "failed", "unsupported"]

MAX_LOOKS = 64
LOOKS_SECONDS = 0.5

Reports = dict[tuple[str, str], list[JobReport]]


class StatusLooks:
    """Asks the workers how far encodings are that nobody of this process waits for.

    All who ask within half a second are told by one RPC. For the event loop only.
    """

    def __init__(self, workers: AsyncWorkers):
        self._workers = workers
        self._wanted: dict[tuple[str, str], wire.Want] = {}
        self._next: asyncio.Task[Reports] | None = None
        self._asked_at = -LOOKS_SECONDS
        self._turn = asyncio.Lock()

    async def look(
        self, ref: SpeakerRef, encoder_names: Iterable[str]
    ) -> list[JobReport]:
        """Return what the workers say of these encodings of one audio.

        Raises: WorkerRPCError.
        """
        while self._next is not None and len(self._wanted) >= MAX_LOOKS:
            await asyncio.wait([self._next])
        names = list(encoder_names)
        for name in names:
            self._wanted[ref.audio_sha256, name] = wire.Want(
                audio_sha256=ref.audio_sha256, encoder=name, segment=ref.segment.value
            )
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._next.add_done_callback(_retrieve)
        reports = await asyncio.shield(self._next)
        return [r for name in names for r in reports.get((ref.audio_sha256, name), [])]

    async def _ask(self) -> Reports:
        async with self._turn:  # a busy worker answers late
            wait = self._asked_at + LOOKS_SECONDS - time.monotonic()
            await asyncio.sleep(max(0.0, wait))
            wanted, self._wanted, self._next = self._wanted, {}, None
            self._asked_at = time.monotonic()
            # A lease of no seconds: tell, and encode nothing.
            call = wire.WantCall(wants=list(wanted.values()), lease_seconds=0.0)
            return reports_of(await self._workers.call(WANT, call))


def status_of(reports: list[JobReport]) -> tuple[CacheStatus, str | None]:
    """Derive the status of encodings and, of ``failed``, the reason."""
    states = {report.state for report in reports}
    if states and states == {JobState.READY}:
        return "ready", None
    if states & {JobState.QUEUED, JobState.ENCODING}:
        return "processing", None
    for report in reports:
        if report.state in (JobState.FAILED, JobState.NO_AUDIO):
            return "failed", report.reason or "its reference audio is not stored"
    return "pending", None


def _retrieve(task: "asyncio.Task[Reports]") -> None:
    if not task.cancelled():
        task.exception()  # all who asked may have left
