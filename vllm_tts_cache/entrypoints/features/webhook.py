"""Tells a URL of the operator's when a voice is ready, failed or was deleted.

Messages are those of standardwebhooks.com. What is to be told are rows, which any
server of a fleet works off. A message arrives once, or again if it was not noted that
it had arrived, as by a server that was killed.
"""

import asyncio
import base64
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from sqlalchemy import Connection

from vllm_tts_cache.catalogue import voice_news
from vllm_tts_cache.catalogue.voice_news import News
from vllm_tts_cache.config import Settings, load_settings
from vllm_tts_cache.entrypoints.serving import fetching
from vllm_tts_cache.entrypoints.serving.serving import CachedServingSpeech
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.served_model import CannotCloneError
from vllm_tts_cache.entrypoints.speakers.service import SpeakerService
from vllm_tts_cache.errors import ConfigError, StorageError, log_text_of
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.rpc_client import UnsupportedModelError

LOOK_SECONDS = 2.0
POST_SECONDS = 10.0
# After 5 s, and each time twice as long, but at most an hour: for about a day.
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 3600.0
MAX_ATTEMPTS = 32
AT_ONCE = 8
_SETTLED_AT_ONCE = 100
_NOTE_AGAIN_SECONDS = (1, 5, 10, 20, 0)
_IN_BASE64 = "whsec_"

throttled = ThrottledLog()


def signature(secret: str, id_: str, timestamp: int, body: bytes) -> str:
    """Sign a message. A secret is ``whsec_`` and base64, or any other text.

    Raises: ConfigError: It is empty, or no base64.
    """
    key = secret.encode()
    with suppress(ValueError):
        if secret.startswith(_IN_BASE64):
            key = base64.b64decode(secret.removeprefix(_IN_BASE64), validate=True)
    if not key or key.startswith(_IN_BASE64.encode()):
        raise ConfigError(
            "SPEAKER_WEBHOOK_URL is set, and SPEAKER_WEBHOOK_SECRET is not, or what "
            f"follows its {_IN_BASE64} is no base64: set it as the receiver has it"
        )
    signed = f"{id_}.{timestamp}.".encode() + body
    digest = hmac.new(key, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def check(settings: Settings) -> None:
    """Refuse settings with which nothing can be told. Raises: ConfigError."""
    url = urlsplit(settings.webhook_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError("SPEAKER_WEBHOOK_URL is no address like https://host/path")
    signature(settings.webhook_secret, "", 0, b"")


class Webhook:
    """Finds news of voices, and posts them; for the event loop only."""

    def __init__(self, speakers: SpeakerService, settings: Settings):
        self._speakers = speakers
        self._settings = settings
        self._database = speakers.store.database
        self._connection = fetching.FetchConnection(
            max_waiting=AT_ONCE, networks=settings.webhook_networks
        )
        self._threads = BoundedExecutor(
            "news of voices are read", num_threads=3, max_waiting=AT_ONCE
        )
        self._has_begun = False
        # Behind it are voices that have not been looked at in this round.
        self._after = 0
        # Apart: a receiver that answers late holds nothing else up, nor do workers.
        acts = partial(self._threads.run, self._follow), self._settle, self._tell
        self._tasks = [asyncio.create_task(self._repeat(act)) for act in acts]

    def shutdown(self) -> None:
        """Stop; what is not told yet is told after the next start."""
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown()
        self._connection.shutdown()
        # Its own tasks end first.
        self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        await asyncio.wait(self._tasks)
        await (await self._connection.get_async_client()).close()

    async def _repeat(self, act: Callable[[], Awaitable[bool]]) -> None:
        """Act again and again; at once where there is more to do."""
        while True:
            has_more = False
            try:
                has_more = await act()
            except Exception as exc:  # noqa: BLE001
                message = "The webhook is not told: %s"
                throttled.warn_of("webhook", message, log_text_of(exc))
            if not has_more:
                await asyncio.sleep(LOOK_SECONDS)

    # -------- finding

    def _follow(self) -> bool:
        """Note what is new, replaced and deleted; return whether more may be."""
        if not self._has_begun:
            with self._database.write_long() as db:
                voice_news.begin(db)
            self._has_begun = True
        with self._database.read() as db:
            after = voice_news.last_generation(db)
            is_new = voice_news.has_new(db, after)
            is_gone = voice_news.has_gone(db)
        if is_new or is_gone:
            with self._database.write() as db:
                voice_news.adopt(db, after)
                voice_news.note_gone(db)
        return is_new or is_gone

    async def _settle(self) -> bool:
        """Note what is ready or failed; return whether more may be."""
        try:
            needed = sorted((await self._speakers.encodings.fingerprints()).values())
        except (CannotCloneError, UnsupportedModelError):
            return False
        found, self._after = await self._threads.run(self._unsettled, needed)
        num_settled = 0
        for number, tenant, speaker_id in found:
            find = self._speakers.store.find
            stored = await self._threads.run(find, speaker_id, tenant)
            if stored is None or stored.record.generation != number:
                continue
            state, reason, *_ = await self._speakers.encodings.status(stored)
            if state in ("ready", "failed"):
                settle = partial(
                    voice_news.settle, number=number, state=state, reason=reason
                )
                num_settled += sum(await self._threads.run(self._write, settle))
        # At once where voices were settled, and past generations without any.
        return num_settled > 0 or (self._after > 0 and not found)

    def _unsettled(self, needed: list[str]) -> tuple[list[tuple[int, str, str]], int]:
        with self._database.read() as db:
            return voice_news.unsettled(db, needed, self._after, _SETTLED_AT_ONCE)

    def _write(self, *changes: Callable[[Connection], Any]) -> list[Any]:
        with self._database.write() as db:
            return [change(db) for change in changes]

    # -------- telling

    async def _tell(self) -> bool:
        """Post what is due; return whether more may be."""
        if not (due := await self._threads.run(self._claim)):
            return False
        problems = await asyncio.gather(*map(self._problem_of_post, due))
        done = [*map(self._done, due, problems)]
        for seconds in _NOTE_AGAIN_SECONDS:  # else all are told once more
            with suppress(StorageError):
                await self._threads.run(self._write, *done)
                break
            await asyncio.sleep(seconds)
        return len(due) == AT_ONCE

    def _claim(self) -> list[News]:
        with self._database.read() as db:
            if not voice_news.is_due(db):
                return []
        with self._database.write() as db:
            return voice_news.claim(db, AT_ONCE)

    def _done(self, news: News, problem: str | None) -> Callable[[Connection], None]:
        """Return what notes that news were posted, or are to be posted again."""
        if problem is None:
            return partial(voice_news.told, news=news)
        throttled.warn_of("webhook answer", "The webhook is not reached: %s", problem)
        if news.num_attempts + 1 >= MAX_ATTEMPTS:
            message = "The webhook is not told any more that %s is %s."
            throttled.warn_of("webhook end", message, news.speaker_id, news.state)
            return partial(voice_news.told, news=news)
        seconds = min(FIRST_RETRY_SECONDS * 2**news.num_attempts, MAX_RETRY_SECONDS)
        return partial(voice_news.failed, news=news, seconds=seconds)

    async def _problem_of_post(self, news: News) -> str | None:
        """Send a message; return why it did not arrive, without the URL."""
        body, id_, now = self._body(news), _id_of(news), int(time.time())
        secret = self._settings.webhook_secret
        headers = {
            "Content-Type": "application/json",
            "webhook-id": id_,
            "webhook-timestamp": str(now),
            "webhook-signature": signature(secret, id_, now, body),
        }
        try:
            session = await self._connection.get_async_client()
            async with session.post(
                self._settings.webhook_url,
                data=body,
                headers=headers,
                allow_redirects=False,  # they could lead inside
                timeout=aiohttp.ClientTimeout(total=POST_SECONDS),
            ) as answer:
                is_taken = 200 <= answer.status < 300
                return None if is_taken else f"it answers {answer.status}"
        except Exception as exc:  # noqa: BLE001
            causes = fetching.causes(exc)
            if any(isinstance(each, fetching.NotPublicError) for each in causes):
                network = "name its network in SPEAKER_WEBHOOK_NETWORKS"
                return f"its address is not public; {network}"
            return type(exc).__name__

    def _body(self, news: News) -> bytes:
        data = {"id": news.speaker_id, "name": news.name, "error": news.reason}
        if self._speakers.tenants.is_on:
            data["tenant"] = news.tenant
        return msgspec.json.encode(
            {
                "type": f"voice.{news.state}",
                "timestamp": datetime.fromtimestamp(news.since, UTC),
                "data": {name: value for name, value in data.items() if value},
            }
        )


def _id_of(news: News) -> str:
    """Return the same id for each attempt, by which receivers know a repeated one."""
    named = f"{news.speaker_id} {news.number} {news.state}"
    return f"msg_{hashlib.sha256(named.encode()).hexdigest()[:32]}"


class Speech(CachedServingSpeech):
    """Speech whose voices' news are told."""

    _webhook: Webhook | None = None

    def _restore_uploaded_speakers(self) -> None:
        """Open the storage, if the settings of a webhook are whole."""
        settings = load_settings()
        if settings.webhook_url:
            check(settings)  # before the storage is open
        super()._restore_uploaded_speakers()
        if settings.webhook_url:
            self._webhook = Webhook(self.speakers, settings)

    def shutdown(self) -> None:
        """Stop to tell, and everything else."""
        if self._webhook is not None:
            self._webhook.shutdown()
        super().shutdown()
