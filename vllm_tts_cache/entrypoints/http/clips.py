"""Routes of recordings: check a clip, send one, export and import voices, consents.

Files are sent in pieces, each of which the client has to take in time. Consent
recordings have the routes that OpenAI's client calls.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, File, Form, Header, Query, Request, UploadFile
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Message, Receive, Scope, Send

from vllm_tts_cache.catalogue.records import check_text
from vllm_tts_cache.entrypoints.http import forms, models, routing
from vllm_tts_cache.entrypoints.http.models import CONSENT_ID, FILE_HEADERS, answers
from vllm_tts_cache.entrypoints.http.routing import CallingTenant, GuardedRoute
from vllm_tts_cache.entrypoints.http.voices import Handler, shown
from vllm_tts_cache.errors import DownloadsOffError, SpeakerRequestError
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.bundles import Imported

router = APIRouter(route_class=GuardedRoute)

MAX_PAGE = 100
BUNDLE_TYPE = "application/vnd.vllm-tts-cache.bundle+zip"
# A slow client gets the next piece of this size once it has taken the last.
_PIECE_BYTES = 256 * 1024
# One range of bytes; a header that says anything else is answered with the file.
_RANGE = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?", re.ASCII | re.IGNORECASE)


class RangeNotSatisfiableError(SpeakerRequestError, status=416):
    """A request names bytes behind the end of a file (416)."""

    def __init__(self, given: str, num_bytes: int):
        super().__init__(
            f"Invalid Range: {given[:64]!r} asks for bytes behind the end, and the "
            f"file has {num_bytes}. Leave it out, or ask for bytes=0-{num_bytes - 1}."
        )
        self.headers = {"Content-Range": f"bytes */{num_bytes}"}


class PlacedFile(StreamingResponse):
    """Sends a file from memory; calls ``leave`` when the answer has ended or failed."""

    def __init__(
        self,
        data: bytes,
        leave: Callable[[], None],
        media_type: str,
        headers: Mapping[str, str],
    ):
        headers = {**headers, "Content-Length": str(len(data))}
        super().__init__(_in_pieces(data), media_type=media_type, headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""
        began, num_bytes = time.monotonic(), 0

        async def in_time(message: Message) -> None:
            nonlocal num_bytes
            num_bytes += len(message.get("body", b""))
            left = routing.seconds_left(began, num_bytes)
            try:
                await asyncio.wait_for(send(message), left)
            except TimeoutError:
                # Ends as if the client had left: other requests wait for its slot.
                raise OSError("the client reads too slowly") from None

        pieces: Any = self.body_iterator
        try:
            async with aclosing(pieces):
                await super().__call__(scope, receive, in_time)
        finally:
            self._leave()


def _requested(asked_range: str, num_bytes: int) -> range | None:
    """Return which bytes a range is; None for all. Raises: RangeNotSatisfiableError."""
    if (named := _RANGE.fullmatch(asked_range.strip())) is None:
        return None
    first, last = (None if each is None else int(each) for each in named.groups())
    if first is None:
        if last is None:
            return None
        part = range(max(0, num_bytes - last), num_bytes)
    elif last is not None and last < first:
        return None
    else:
        part = range(num_bytes)[first : None if last is None else last + 1]
    if not part:
        raise RangeNotSatisfiableError(named.group(), num_bytes)
    return part


async def _in_pieces(data: bytes) -> AsyncIterator[bytes]:
    """Cut a file that is in memory into pieces.

    A whole file would stay in the socket's buffer for as long as the client likes.
    """
    for at in range(0, len(data), _PIECE_BYTES):
        yield data[at : at + _PIECE_BYTES]


@router.post("/v1/audio/voices/check", responses=answers(models.Quality, 413, 500))
async def check_clip(
    handler: Handler,
    tenant: CallingTenant,
    audio_sample: Annotated[UploadFile, File(description="the clip")],
    ref_text: Annotated[
        str | None,
        Form(
            description="what is said in it, if that is known",
            examples=["The keeper counts the ships at dusk."],
        ),
    ] = None,
) -> Any:
    """Judge a clip before it is registered; it is not stored."""
    # Refuses a long text before other checks read it, as a registration does.
    check_text("ref_text", ref_text)
    data = await forms.read_clip(audio_sample)
    return (await handler.speakers.uploads.check(tenant, data, ref_text)).to_dict()


@router.head(
    "/v1/audio/voices/{name}/audio",
    responses={200: {"description": "the headers of the file"}, **models.refusals(404)},
    response_class=Response,
    description="The headers that a GET answers with: how long the file is, and its "
    "`ETag`.",
)
@router.get(
    "/v1/audio/voices/{name}/audio",
    responses=models.part_answers(("audio/flac", "audio/wav"), 404),
    response_class=Response,
)
async def get_audio(
    request: Request,
    handler: Handler,
    tenant: CallingTenant,
    name: forms.VoiceName,
    asked_range: Annotated[
        str | None,
        Header(
            alias="Range", description="one range of bytes", examples=["bytes=0-1023"]
        ),
    ] = None,
    if_range: Annotated[
        str | None,
        Header(
            alias="If-Range",
            description="the `ETag` of the file that the range is of",
            examples=['"5f0c2b9a64d1473e8a1b2c3d4e5f6071"'],
        ),
    ] = None,
) -> Response:
    """Give the reference audio back: the same samples, as FLAC or WAV."""
    speakers = handler.speakers
    if not speakers.settings.audio_download:
        raise DownloadsOffError
    leave = speakers.sounds.enter()
    try:
        found = await speakers.lookups.get(tenant, name)
        data, media_type = await speakers.lookups.audio(found.record)
        etag = f'"{found.record.audio_sha256}-{len(data):x}"'
        headers = {**FILE_HEADERS, "Accept-Ranges": "bytes", "ETag": etag}
        if request.method == "HEAD":
            leave()
            headers["Content-Length"] = str(len(data))
            return Response(media_type=media_type, headers=headers)
        part = None
        if asked_range is not None and if_range in (None, etag):
            part = _requested(asked_range, len(data))
        if part is None:
            return PlacedFile(data, leave, media_type, headers)
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(data)}"
        answer = PlacedFile(data[part.start : part.stop], leave, media_type, headers)
        answer.status_code = 206
        return answer
    except BaseException:
        leave()
        raise


@router.get(
    "/v1/audio/voices/{name}/bundle",
    responses=models.file_answers((BUNDLE_TYPE,), 404),
    response_class=Response,
)
async def export_voice(
    handler: Handler, tenant: CallingTenant, name: forms.VoiceName
) -> Response:
    """Give one file that holds the voice, its consent recording and its encodings."""
    speakers = handler.speakers
    if not speakers.settings.audio_download:
        raise DownloadsOffError
    leave = speakers.exports.enter()
    try:
        run = speakers.bundling.run
        record, data = await run(speakers.bundles.export, name, tenant.name)
    except BaseException:
        leave()
        raise
    disposition = f"attachment; filename*=UTF-8''{quote(record.name, safe='')}.voice"
    headers = {**FILE_HEADERS, "Content-Disposition": disposition}
    return PlacedFile(data, leave, BUNDLE_TYPE, headers)


@router.post(
    "/v1/audio/voices/import", responses=answers(models.Imported, 409, 413, 507)
)
async def import_voice(
    handler: Handler,
    tenant: CallingTenant,
    bundle: Annotated[UploadFile, File(description="the bundle")],
    name: Annotated[
        str | None,
        Form(
            description="the voice's name here; by default the one in the bundle",
            examples=["keeper"],
        ),
    ] = None,
    on_conflict: Annotated[
        Literal["fail", "replace", "rename"],
        Form(description="what to do where the name is taken", examples=["rename"]),
    ] = "fail",
    key: forms.RepeatedKey = None,
) -> Any:
    """Register the voice of a bundle, whole or not at all.

    Encodings are taken from bundles that this server signed, or one with the same
    `SPEAKER_BUNDLE_KEY`; others are made anew, in the background.
    """
    speakers = handler.speakers

    def import_() -> Imported:
        return speakers.bundles.import_voice(
            bundle.file.read(bundle_format.MAX_BYTES + 1),  # in this import's turn
            check=handler.check_new,
            check_audio=speakers.uploads.check_registrable,
            check_embedding=handler.check_embedding,
            name=name,
            on_conflict=on_conflict,
            tenant=tenant,
            key=key,
        )

    done = await speakers.bundling.run(import_)
    speakers.registered(done.done)
    imported = {
        "voice": shown(speakers, done.done.record),
        "encodings_kept": done.num_kept,
        "encodings_left": done.num_left,
    }
    return {"imported": [imported]}


class ConsentChanges(BaseModel):
    """What may be changed of a recording."""

    name: str = Field(examples=["Ann's consent"])


@router.post(
    "/v1/audio/voice_consents", responses=answers(models.Consent, 409, 413, 507)
)
async def create_consent(
    handler: Handler,
    tenant: CallingTenant,
    name: Annotated[
        str, Form(description="a label for people", examples=["Ann's consent"])
    ],
    language: Annotated[str, Form(description="BCP 47 tag", examples=["en-US"])],
    recording: Annotated[UploadFile, File(description="the clip")],
) -> Any:
    """Keep a recording in which a person consents to being cloned."""
    data = await forms.read_clip(recording)
    uploads = handler.speakers.uploads
    kept = await uploads.keep_consent(tenant, name, language, data)
    return models.consent(kept)


@router.get("/v1/audio/voice_consents", responses=answers(models.ConsentList))
async def list_consents(
    handler: Handler,
    tenant: CallingTenant,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, examples=[20])] = 20,
    after: Annotated[
        str, Query(description="`last_id` of the last page", examples=[CONSENT_ID])
    ] = "",
) -> Any:
    """List recordings, newest first."""
    speakers = handler.speakers
    on_page = speakers.store.consents.on_page
    found = await speakers.lookups.reads.run(on_page, limit + 1, after, tenant.name)
    data = [models.consent(record) for record in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


@router.get(
    "/v1/audio/voice_consents/{consent_id}", responses=answers(models.Consent, 404)
)
async def get_consent(
    handler: Handler, tenant: CallingTenant, consent_id: forms.ConsentId
) -> Any:
    """Show one recording."""
    run, get = handler.speakers.lookups.reads.run, handler.speakers.store.consents.get
    found = await run(get, consent_id, tenant.name)
    return models.consent(found)


@router.post(
    "/v1/audio/voice_consents/{consent_id}", responses=answers(models.Consent, 404, 413)
)
async def change_consent(
    handler: Handler,
    tenant: CallingTenant,
    consent_id: forms.ConsentId,
    changes: ConsentChanges,
) -> Any:
    """Change a recording's label."""
    speakers = handler.speakers
    rename, run = speakers.store.consents.rename, speakers.uploads.changes.run
    changed = await run(rename, consent_id, changes.name, tenant.name)
    return models.consent(changed)


@router.delete(
    "/v1/audio/voice_consents/{consent_id}",
    responses=answers(models.ConsentDeleted, 404, 409),
)
async def delete_consent(
    handler: Handler, tenant: CallingTenant, consent_id: forms.ConsentId
) -> Any:
    """Delete a recording that no voice stands on; else 409 says which do."""
    await handler.speakers.deletions.delete_consent(consent_id, tenant.name)
    return {"id": consent_id, "object": "audio.voice_consent", "deleted": True}
