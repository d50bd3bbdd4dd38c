"""The route that gives many voices as one stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Response

from vllm_tts_cache.catalogue.pages import Page, cursor
from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.answer_documents import file_answers
from vllm_tts_cache.entrypoints.callers import CallingTenant
from vllm_tts_cache.entrypoints.routing import CHANGES_MAX_BYTES, guarded_route
from vllm_tts_cache.entrypoints.sending import PlacedAnswer, in_pieces
from vllm_tts_cache.entrypoints.service import SpeakerService
from vllm_tts_cache.entrypoints.voice_forms import parse_label_filters
from vllm_tts_cache.entrypoints.voice_models import FILE_HEADERS
from vllm_tts_cache.entrypoints.voices import Handler, Labels, Search
from vllm_tts_cache.errors import (
    DownloadsOffError,
    InvalidSpeakerError,
    ServerBusyError,
    SpeakerNotFoundError,
    StorageBusyError,
    StorageError,
    StorageUnavailableError,
)
from vllm_tts_cache.store.archive_format import MEDIA_TYPE, ArchiveWriter

router = APIRouter(route_class=guarded_route(CHANGES_MAX_BYTES))

MAX_NAMES = 1000
# How long a catalogue that is down is waited for.
PATIENCE_SECONDS = 60.0
_PAGE = 100
_HEADERS = {
    **FILE_HEADERS,
    "Content-Disposition": 'attachment; filename="voices.tar"',
}

T = TypeVar("T")
Records = AsyncIterator[SpeakerRecord]


# Not below `/v1/audio/voices/`, where any word may be the name of a voice.
@router.get(
    "/v1/audio/voice_archive",
    responses=file_answers((MEDIA_TYPE,), 404),
    response_class=Response,
)
async def export_voices(
    handler: Handler,
    tenant: CallingTenant,
    name: Annotated[
        list[str] | None,
        Query(
            description="a name or an id; may be repeated",
            max_length=MAX_NAMES,
            examples=[["keeper"]],
        ),
    ] = None,
    search: Search = None,
    label: Labels = None,
) -> Response:
    """Give voices as one stream: a tar file of their bundles.

    Of those that are named, or fit `search` and `label`, or all. It ends with
    `archive.json`, which says how many it holds and which were left out: deleted
    meanwhile, registered as an embedding, or not readable. An archive that breaks off
    has no end.
    """
    speakers = handler.speakers
    if not speakers.may_download:
        raise DownloadsOffError
    if name and (search or label):
        raise InvalidSpeakerError("name", "give names, or search and label, not both")
    labels = parse_label_filters(label or [])
    page = Page(limit=_PAGE, search=search or "", labels=labels, tenant=tenant.name)
    leave = speakers.archives.enter()
    try:
        records = _found(speakers, page)
        if name:
            records = _named(await speakers.lookups.get_all(tenant, name))
    except BaseException:
        leave()
        raise
    return PlacedAnswer(_archive(speakers, records), leave, MEDIA_TYPE, _HEADERS)


async def _archive(speakers: SpeakerService, records: Records) -> AsyncIterator[bytes]:
    writer = ArchiveWriter()
    async for record in records:
        try:
            data = await _bundle(speakers, record)
        except (StorageBusyError, StorageUnavailableError):
            raise  # of all voices: an archive that breaks off has no end
        except (SpeakerNotFoundError, StorageError) as exc:
            writer.leave_out(record.name, _reason(record, exc))
            continue
        before, behind = writer.voice(record.name, len(data))
        yield before
        async for piece in in_pieces(data):
            yield piece
        yield behind
    yield writer.end()


def _reason(record: SpeakerRecord, error: Exception) -> str:
    if record.audio_sha256 is None:
        return "It was registered as an embedding, of which there is no bundle."
    return str(error)


async def _bundle(speakers: SpeakerService, record: SpeakerRecord) -> bytes:
    # By its id: it may be renamed meanwhile.
    run, export = speakers.bundling.run, speakers.bundles.export
    _, data = await _in_turn(lambda: run(export, record.speaker_id, record.tenant))
    return data


async def _named(records: Iterable[SpeakerRecord]) -> Records:
    for record in {record.speaker_id: record for record in records}.values():
        yield record


async def _found(speakers: SpeakerService, page: Page) -> Records:
    while found := await _in_turn(partial(speakers.lookups.records, page)):
        for record in found:
            yield record
        page = replace(page, after=cursor(found[-1], page.sort))


async def _in_turn(call: Callable[[], Awaitable[T]]) -> T:
    """Wait as others are told to: the answer has begun, and cannot be a 503.

    Raises: StorageBusyError, StorageUnavailableError after a minute of it.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await call()
        except ServerBusyError as exc:
            pause = exc.retry_after_seconds
        except (StorageBusyError, StorageUnavailableError) as exc:
            pause = exc.retry_after_seconds
            if time.monotonic() + pause > until:
                raise
        await asyncio.sleep(pause)
