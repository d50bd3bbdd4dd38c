"""From a speech request to the speaker it names: registered, inline, or none."""

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.base import MediaIO

from vllm_tts_cache.audio.decode import decode, decode_data_url, decode_path
from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.entrypoints.storage import Storage
from vllm_tts_cache.errors import InvalidAudioError, TTSCacheError
from vllm_tts_cache.speaker.ref import SpeakerRef

MAX_REMEMBERED_CLIPS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Reference audio by address, with what the prompt's length depends on."""

    ref: SpeakerRef
    num_samples: int
    sample_rate_hz: int

    @classmethod
    def of_record(cls, record: SpeakerRecord) -> "Clip | None":
        """The clip of a registered speaker; None if it is an embedding."""
        if record.audio_sha256 is None:
            return None
        ref = SpeakerRef(audio_sha256=record.audio_sha256, segment=Segment.REGISTERED)
        return cls(
            ref=ref,
            num_samples=record.num_samples,
            sample_rate_hz=record.sample_rate_hz,
        )


class InlineClips:
    """Inline reference audio: decoded, checked and stored once, then known by its text.

    A client that repeats its data URL pays one hash of it, not one decoding. What lies
    behind another URL may change, so it is fetched again, but once at a time.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._known: OrderedDict[str, Clip] = OrderedDict()
        self._fetches: dict[str, asyncio.Task[Clip]] = {}

    async def resolve(self, url: str, connector: MediaConnector) -> Clip:
        """Return the clip behind a data, http(s) or file URL.

        What a server may fetch is the host's decision: its allowed media domains
        and its allowed local media path hold here as well.

        Raises: InvalidAudioError, StorageError.
        """
        if url[:5].lower() == "data:":
            return await asyncio.to_thread(self._of_data_url, url)
        if (fetch := self._fetches.get(url)) is None:
            fetch = asyncio.create_task(self._fetch(url, connector))
            self._fetches[url] = fetch
            fetch.add_done_callback(lambda _: self._fetches.pop(url, None))
        # Shared by all who ask meanwhile, so none of them may cancel it.
        return await asyncio.shield(fetch)

    async def _fetch(self, url: str, connector: MediaConnector) -> Clip:
        audio = await _fetched(url, connector)
        return await asyncio.to_thread(self._keep, audio)

    def _of_data_url(self, url: str) -> Clip:
        digest = hashlib.sha256(url.encode()).hexdigest()
        clip = self._known.get(digest)
        if clip is not None and self._storage.audio.path(clip.ref.audio_sha256):
            return clip
        clip = self._keep(decode_data_url(url).audio)
        self._known[digest] = clip
        while len(self._known) > MAX_REMEMBERED_CLIPS:
            self._known.popitem(last=False)
        return clip

    def _keep(self, audio: ReferenceAudio) -> Clip:
        self._storage.audio.put(audio, Segment.INLINE)
        ref = SpeakerRef(audio_sha256=audio.audio_sha256, segment=Segment.INLINE)
        return Clip(
            ref=ref,
            num_samples=audio.num_samples,
            sample_rate_hz=audio.sample_rate_hz,
        )


async def _fetched(url: str, connector: MediaConnector) -> ReferenceAudio:
    try:
        return await connector.load_from_url_async(url, _ReferenceAudioIO())
    except TTSCacheError:
        raise
    except Exception as exc:
        # A URL that is not allowed, not there or too slow is the caller's to mend,
        # and the host's reasons come in many classes.
        raise InvalidAudioError(f"its URL cannot be fetched: {exc}") from exc


class _ReferenceAudioIO(MediaIO[ReferenceAudio]):
    """The host fetches, we decode: at the source's precision, within our limits."""

    def get_max_bytes(self) -> int:
        return DEFAULT_LIMITS.max_bytes

    def load_bytes(self, data: bytes) -> ReferenceAudio:
        return decode(data).audio

    def load_base64(self, media_type: str, data: str) -> ReferenceAudio:
        return decode_data_url(f"data:{media_type};base64,{data}").audio

    def load_file(self, filepath: Path) -> ReferenceAudio:
        return decode_path(filepath).audio


def single_url(ref_audio: Any) -> str:
    """Return the one URL of a request's ``ref_audio``.

    Raises: InvalidAudioError if there is not exactly one.
    """
    urls = ref_audio if isinstance(ref_audio, list) else [ref_audio]
    if len(urls) != 1 or not isinstance(urls[0], str):
        raise InvalidAudioError("give one URL (http, https, file or data)")
    return urls[0]
