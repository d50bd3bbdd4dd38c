"""Short texts that voices have spoken, kept by content beside their audio.

A preview is what a model made of a voice's audio, as an encoding is; so it is stored as
one, evicted as one, and deleted with the voice. Tenants do not share them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.executors import RETRY_AFTER_SECONDS, BoundedExecutor
from vllm_tts_cache.errors import EncodingCorruptError, ServerBusyError
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.preview_kinds import preview_kind
from vllm_tts_cache.store.speaker_store import SpeakerStore

Look = Callable[[], Awaitable[SpeakerRecord]]
Make = Callable[[SpeakerRecord, str, float], Awaitable[bytes | None]]

# Of each tenant, the one that is made among them.
MAX_WAITING = 8
# For a short text, once the voice is encoded.
SPEAK_SECONDS = 60.0
_ARRAY = "wav"
_DOMAIN = "vllm-tts-cache/preview/v1"

_TEXTS = {
    "de": "So klinge ich. Schön, dass du mir zuhörst.",
    "en": "This is how I sound. It is good to have you listening.",
    "es": "Así sueno yo. Me alegra que me escuches.",
    "fr": "Voici ma voix. Merci de m'écouter.",
    "it": "Ecco la mia voce. Grazie per l'ascolto.",
    "ja": "これが私の声です。聞いてくれてありがとう。",
    "ko": "제 목소리는 이렇습니다. 들어 주셔서 고맙습니다.",
    "pt": "É assim que eu falo. Obrigado por me ouvir.",
    "ru": "Вот так звучит мой голос. Спасибо, что слушаете.",
    "zh": "这就是我的声音。谢谢你的聆听。",
}


def default_text(language: str | None) -> str:
    """What a voice says if nobody tells it what: in its language, or in English."""
    return _TEXTS.get((language or "en").split("-")[0].lower(), _TEXTS["en"])


@dataclass(slots=True)
class _Line:
    """The previews of one tenant that wait, and whose turn it is among them."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


class Previews:
    """Keeps previews and has them made, one after another; for the event loop only.

    Tenants take turns, however many previews one of them asks for.

    Args:
        reads: Runs what reads and writes files.
        encode_seconds: How long an encode may take that a preview has to wait for.
    """

    def __init__(
        self, store: SpeakerStore, reads: BoundedExecutor, encode_seconds: float
    ):
        self._store = store
        self._reads = reads
        self._make_seconds = encode_seconds + SPEAK_SECONDS
        self._turn = asyncio.Lock()
        self._lines: dict[str, _Line] = {}

    async def kept(self, record: SpeakerRecord, model: str, text: str) -> bytes | None:
        """Return the WAV file that was kept of this text; None if there is none.

        Raises: ServerBusyError, StorageError.
        """
        if (key := _key(record, model, text)) is None:
            return None
        try:
            found = await self._reads.run(self._store.read, key)
        except EncodingCorruptError:  # it was set aside
            return None
        return None if found is None else found[_ARRAY].tobytes()

    async def kept_or_made(
        self, look: Look, model: str, text: str | None, make: Make
    ) -> tuple[bytes | None, bool]:
        """Return the WAV file, and whether it was there.

        Args:
            look: Returns the voice as it is now. While others are waited for, and while
                it speaks, another clip may be registered under its id: what was said
                by it then is answered, and kept by nobody.
            model: Which model speaks.
            text: What it says; None for `default_text`.
            make: Speaks, within so many seconds; None if that failed.

        Raises: ServerBusyError if too many of the tenant's wait, StorageError, and
            what ``look`` and ``make`` do.
        """
        record = await look()
        if (kept := await self.kept(record, model, _told(record, text))) is not None:
            return kept, True  # it waits for nobody
        async with self._in_turn(record.tenant):
            record = await look()
            told = _told(record, text)
            if (kept := await self.kept(record, model, told)) is not None:
                return kept, True
            made = await make(record, told, self._make_seconds)
            if made is not None and await look() == record:
                await self._keep(record, model, told, made)
            return made, False

    @asynccontextmanager
    async def _in_turn(self, tenant: str) -> AsyncIterator[None]:
        line = self._lines.setdefault(tenant, _Line())
        if line.num_waiting >= MAX_WAITING:
            raise ServerBusyError("too many previews wait", RETRY_AFTER_SECONDS)
        line.num_waiting += 1
        try:
            # Only the first of each line waits for the server's turn.
            async with line.turn, self._turn:
                yield
        finally:
            line.num_waiting -= 1
            if not line.num_waiting:
                del self._lines[tenant]

    async def _keep(
        self, record: SpeakerRecord, model: str, text: str, wav: bytes
    ) -> None:
        if (key := _key(record, model, text)) is not None:
            encoding = Encoding({_ARRAY: np.frombuffer(wav, np.uint8)})
            publish = self._store.publish_preview
            await self._reads.run(publish, key, encoding, record.tenant)


def _told(record: SpeakerRecord, text: str | None) -> str:
    return text or default_text(record.language)


def _key(record: SpeakerRecord, model: str, text: str) -> EncodingKey | None:
    """All that decides what is heard; None for a voice without audio."""
    if record.audio_sha256 is None:
        return None
    told = json.dumps([_DOMAIN, model, record.ref_text or "", text])
    return EncodingKey(
        audio_sha256=record.audio_sha256,
        encoder_fingerprint=preview_kind(record.tenant, told),
    )
