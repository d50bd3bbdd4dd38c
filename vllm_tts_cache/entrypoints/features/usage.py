"""``GET /v1/audio/usage``: how much each voice spoke, by day.

A process counts in memory and writes every few seconds; one that is killed loses what
it has not written yet. Registered voices are counted, on the plugin's families.
"""

import asyncio
import secrets
import threading
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query
from pydantic import Field

from vllm_tts_cache.catalogue import voice_usage
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.names import is_storable
from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.catalogue.voice_usage import Counts, Key
from vllm_tts_cache.entrypoints.http import models
from vllm_tts_cache.entrypoints.http.models import answers
from vllm_tts_cache.entrypoints.http.routing import AnyCaller, GuardedRoute
from vllm_tts_cache.entrypoints.http.voices import Handler
from vllm_tts_cache.entrypoints.serving import request_speaker
from vllm_tts_cache.entrypoints.serving.serving import CachedServingSpeech
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.errors import InvalidSpeakerError, StorageError, TTSCacheError
from vllm_tts_cache.logs import ThrottledLog

WRITE_SECONDS = 10.0
KEPT_DAYS = 400
USUAL_DAYS, MAX_DAYS = 30, 366
MAX_ROWS = 1000
# Voices that speak between two writes; more are not counted while no write succeeds.
MAX_COUNTED = 10_000
_AT_ONCE = 500

throttled = ThrottledLog()
router = APIRouter(route_class=GuardedRoute)


class Tally:
    """Counts what voices speak; for the event loop only."""

    def __init__(self, database: Database):
        self._database = database
        self._counts: dict[Key, Counts] = {}
        # What a write failed with is written as it was: its commit may have been done.
        self._tried: tuple[str, dict[Key, Counts]] | None = None
        self._writer, self._writing = secrets.token_hex(32), threading.Lock()
        self._threads = BoundedExecutor(
            "too many ask for usage", num_threads=1, max_waiting=64
        )
        # Here, where no request's context is that it would keep.
        self._task = asyncio.create_task(self._write_regularly())
        self._last_day: date | None = None

    def add(self, record: SpeakerRecord, counts: Counts) -> None:
        """Count for a voice, today."""
        key = Key(self.today().isoformat(), record.tenant, record.speaker_id)
        if key not in self._counts and len(self._counts) >= MAX_COUNTED:
            throttled.warn_of("usage", "Too many voices speak to be counted.")
            return
        self._counts[key] = self._counts.get(key, Counts()).plus(counts)

    def today(self) -> date:
        """Return the day in UTC, by the catalogue's clock: those of machines differ."""
        return datetime.fromtimestamp(self._database.now(), UTC).date()

    async def write(self) -> None:
        """Write what was counted. Raises: StorageError, and the counts stay."""
        taken, self._counts = self._counts, {}
        try:
            await self._threads.run(self._write, taken)
        except BaseException:
            for key, counts in taken.items():
                self._counts[key] = self._counts.get(key, Counts()).plus(counts)
            raise

    def shutdown(self) -> None:
        """Write the rest, if the catalogue answers."""
        self._task.cancel()
        self._threads.shutdown()
        taken, self._counts = self._counts, {}
        try:
            self._write(taken)
        except StorageError as exc:
            throttled.warn_of("usage", "Usage is lost: %s", exc.log_text)

    async def _write_regularly(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            try:
                await self.write()
            except TTSCacheError as exc:  # the next write has these counts as well
                throttled.warn_of("usage", "Usage is not written: %s", exc.log_text)

    def _write(self, spoken: dict[Key, Counts]) -> None:
        with self._writing:
            while self._tried or spoken:  # others write between
                if self._tried is None:
                    some = {key: spoken.pop(key) for key in sorted(spoken)[:_AT_ONCE]}
                    self._tried = secrets.token_hex(8), some
                with self._database.write() as db:
                    voice_usage.add(db, self._writer, *self._tried)
                self._tried = None
            if (today := self.today()) != self._last_day:
                with self._database.write() as db:
                    voice_usage.delete_before(db, today - timedelta(days=KEPT_DAYS))
                self._last_day = today


class Speech(CachedServingSpeech):
    """Speech that is counted."""

    tally: Tally

    def _start(self) -> None:
        super()._start()
        self.tally = Tally(self.speakers.store.database)

    def shutdown(self) -> None:
        """Write what was counted, and stop."""
        self.tally.shutdown()
        super().shutdown()

    def create_audio(self, audio_obj: Any) -> Any:
        """Make a file, and count how long it lasts."""
        num_samples = max(audio_obj.audio_tensor.shape, default=0)
        seconds = num_samples / audio_obj.sample_rate / (audio_obj.speed or 1.0)
        made = super().create_audio(audio_obj)
        speaking = request_speaker.SPEAKING.get()
        if num_samples and speaking is not None and speaking.record is not None:
            # Its characters are counted with a request's first audio.
            has_begun = speaking.notes.get("has_begun")
            said = (0, 0) if has_begun else (1, len(speaking.request.input))
            speaking.notes["has_begun"] = True
            self.tally.add(speaking.record, Counts(*said, seconds))
        return made


class Spoken(models.Answer):
    """What was spoken."""

    requests: int = Field(examples=[12])
    characters: int = Field(description="of the inputs", examples=[420])
    seconds: float = Field(description="of audio", examples=[31.4])


class SpokenByVoice(Spoken):
    """What a voice spoke on a day."""

    day: date = Field(description="in UTC", examples=["2026-11-28"])
    voice_id: str = Field(examples=[models.VOICE_ID])
    name: str | None = Field(
        description="null of a voice that is deleted", examples=["keeper"]
    )
    tenant: str | None = Field(
        default=None, description="for an administrator", examples=["acme"]
    )


class Usage(models.Answer):
    """A page, newest day first."""

    object: Literal["list"]
    data: list[SpokenByVoice]
    totals: Spoken = Field(description="of all pages")
    next: str | None = Field(
        default=None, description="give it as `after`; missing on the last page"
    )


def _parsed(after: str) -> Key | None:
    if not after:
        return None
    key = after.split("/")
    try:
        if not is_storable(after) or len(key) != len(Key._fields):
            raise ValueError
        date.fromisoformat(key[0])
    except ValueError:
        reason = "it is no `next` of a page; leave it out"
        raise InvalidSpeakerError("after", reason) from None
    return Key(*key)


@router.get("/v1/audio/usage", responses=answers(Usage))
async def show_usage(
    handler: Handler,
    caller: AnyCaller,
    since: Annotated[
        date | None, Query(description="30 days without", examples=["2026-11-01"])
    ] = None,
    until: Annotated[
        date | None, Query(description="today without", examples=["2026-11-28"])
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_ROWS, examples=[100])] = MAX_ROWS,
    after: Annotated[
        str, Query(max_length=256, description="`next` of the last page", examples=[""])
    ] = "",
) -> Any:
    """Show how much each voice spoke on each day: all tenants' for an administrator.

    Days are those of UTC. Other servers of a fleet add theirs within ten seconds.
    """
    tally = cast(Speech, handler).tally
    last = until or tally.today()
    first = since or date.fromordinal(max(1, last.toordinal() - USUAL_DAYS + 1))
    if not 0 <= (last - first).days < MAX_DAYS:
        reason = f"until must not be before since, and at most {MAX_DAYS} days"
        raise InvalidSpeakerError("since", reason)
    behind = _parsed(after)
    with suppress(TTSCacheError):  # what is written can be read all the same
        await tally.write()
    tenant = None if caller.tenant is None else caller.tenant.name
    store, reads = handler.speakers.store, handler.speakers.lookups.reads

    def look() -> Any:
        with store.database.read() as db:
            return voice_usage.between(db, tenant, first, last, limit + 1, behind)

    found, totals = await reads.run(look)
    rows = found[:limit]
    data = [
        {
            "day": row["day"],
            "voice_id": row["speaker_id"],
            "name": row["name"],
            **({"tenant": row["tenant"]} if tenant is None else {}),
            **{n: row[n] for n in Counts._fields},
        }
        for row in rows
    ]
    answer: dict[str, Any] = {"object": "list", "data": data, "totals": totals}
    if len(found) > limit:
        answer["next"] = "/".join(rows[-1][n] for n in Key._fields)
    return answer
