"""Short texts that voices have spoken, kept by content beside their audio.

A preview is what a model made of a voice's audio, as an encoding is; so it is stored as
one, evicted as one, and deleted with the voice. Tenants do not share them.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

import numpy as np

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.executors import RETRY_AFTER_SECONDS, BoundedExecutor
from vllm_tts_cache.errors import EncodingCorruptError, ServerBusyError
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.preview_kinds import preview_kind
from vllm_tts_cache.store.speaker_store import SpeakerStore

Look = Callable[[], Awaitable[SpeakerRecord]]

MAX_WAITING = 8
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


class Previews:
    """Keeps previews and has them made, one after another; for the event loop only.

    Args:
        reads: Runs what reads and writes files.
    """

    def __init__(self, store: SpeakerStore, reads: BoundedExecutor):
        self._store = store
        self._reads = reads
        self._turn = asyncio.Lock()
        self._num_waiting = 0

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
        self,
        look: Look,
        model: str,
        text: str | None,
        make: Callable[[SpeakerRecord, str], Awaitable[bytes | None]],
    ) -> tuple[bytes | None, bool]:
        """Return the WAV file, and whether it was there.

        Args:
            look: Returns the voice as it is now. While others are waited for, and while
                it speaks, another clip may be registered under its id: what was said
                by it then is answered, and kept by nobody.
            model: Which model speaks.
            text: What it says; None for `default_text`.
            make: Speaks; None if that failed.

        Raises: ServerBusyError if too many wait, StorageError, and what ``look`` does.
        """
        if self._num_waiting >= MAX_WAITING:
            raise ServerBusyError("too many previews wait", RETRY_AFTER_SECONDS)
        self._num_waiting += 1
        try:
            async with self._turn:
                record = await look()
                told = text or default_text(record.language)
                if (kept := await self.kept(record, model, told)) is not None:
                    return kept, True
                made = await make(record, told)
                if made is not None and await look() == record:
                    await self._keep(record, model, told, made)
                return made, False
        finally:
            self._num_waiting -= 1

    async def _keep(
        self, record: SpeakerRecord, model: str, text: str, wav: bytes
    ) -> None:
        if (key := _key(record, model, text)) is not None:
            encoding = Encoding({_ARRAY: np.frombuffer(wav, np.uint8)})
            publish = self._store.publish_preview
            await self._reads.run(publish, key, encoding, record.tenant)


def _key(record: SpeakerRecord, model: str, text: str) -> EncodingKey | None:
    """All that decides what is heard; None for a voice without audio."""
    if record.audio_sha256 is None:
        return None
    told = json.dumps([_DOMAIN, model, record.ref_text or "", text])
    return EncodingKey(
        audio_sha256=record.audio_sha256,
        encoder_fingerprint=preview_kind(record.tenant, told),
    )
