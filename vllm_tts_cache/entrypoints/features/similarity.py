"""Whether a clip sounds like a voice that is there, and like its consent recording.

With ``SPEAKER_SIMILARITY=tell`` registrations and checks say it, with ``refuse``
registrations are refused. What sounds alike is measured: docs/similar-voices.md.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import AudioWarning
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue import voice_timbre
from vllm_tts_cache.catalogue.names import fold, is_consent_id
from vllm_tts_cache.catalogue.records import IdempotencyKey, SpeakerRecord
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.features import timbre
from vllm_tts_cache.entrypoints.serving.serving import CachedServingSpeech
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.registering import Compared, Upload
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import Tenant

# Of two clips: from here on they are one person's, below the other they are not.
SAME_FROM = 0.92
OTHER_BELOW = 0.66
# The newest of a tenant's voices; to compare a clip with these takes 0.3 s.
MAX_COMPARED = 100_000
_AT_ONCE = 4096
# The nearest may be gone, or the voice that is replaced.
_MOST_NAMED = 3
_LOOK_SECONDS = 10.0
_ROUNDS_OF_NEW = 360  # an hour
_NICE = 10

throttled = ThrottledLog()


class Comparison:
    """Compares clips with the voices of their tenant, and keeps how voices sound."""

    def __init__(
        self, store: SpeakerStore, encoder: timbre.TimbreEncoder, *, refuses: bool
    ):
        self._store = store
        self._refuses = refuses
        self._encoder = encoder
        self._threads = BoundedExecutor(
            "voices are heard", num_threads=1, max_waiting=1, nice=_NICE
        )
        # Hears voices that no registration has heard, as imported ones.
        self._task = asyncio.create_task(self._hear_regularly())

    def shutdown(self) -> None:
        """Stop."""
        self._task.cancel()
        self._threads.shutdown()

    def compare(
        self, tenant: Tenant, upload: Upload | None, audio: ReferenceAudio
    ) -> Compared:
        """Return warnings of a clip, and what keeps how it sounds; for a thread.

        What only tells fails no request: without the catalogue it tells nothing.
        ``upload`` is what is to be registered; None if the clip is only checked.

        Raises: SpeakerExistsError, InvalidSpeakerError; StorageError if it may refuse.
        """
        try:
            return self._compared(tenant, upload, audio)
        except errors.SpeakerRequestError:
            raise
        except Exception as exc:
            if self._refuses and upload is not None:
                raise
            message = "Clips are not compared: %s"
            throttled.warn_of("comparing", message, errors.log_text_of(exc))
            return (), lambda _record: None

    def _compared(
        self, tenant: Tenant, upload: Upload | None, audio: ReferenceAudio
    ) -> Compared:
        vectors = self._encoder.vectors(audio)

        def keep(record: SpeakerRecord) -> None:
            """Keep how it sounds; if that fails now, it is heard again."""
            with suppress(errors.StorageError):
                self._keep(record.generation, audio, vectors)

        if not vectors or (upload is not None and self._was_done(tenant, upload)):
            return (), keep
        found: list[AudioWarning] = []
        refuses = self._refuses and upload is not None
        if (like := self._most_like(tenant, upload, vectors)) is not None:
            name, similarity = like
            alike = f"sounds almost the same ({similarity:.2f})"
            if refuses:
                hint = "If that is another person, ask who runs this server."
                raise errors.SpeakerExistsError(name, hint=f"and {alike}. {hint}")
            text = f"The voice {name!r} is there already, and {alike}."
            found.append(AudioWarning("similar_voice", text))
        if upload is not None and (doubt := self._doubt(tenant, upload, vectors)):
            if refuses:
                raise errors.InvalidSpeakerError("consent", doubt)
            found.append(AudioWarning("other_speaker", f"Check the consent: {doubt}."))
        return tuple(found), keep

    def _was_done(self, tenant: Tenant, upload: Upload) -> bool:
        """Whether registering will answer what it answered before."""
        if (key := IdempotencyKey.of(upload.idempotency_key, tenant.name)) is None:
            return False
        with self._store.database.read() as db:
            return voice_timbre.was_done(db, key.key_hash)

    def _most_like(
        self, tenant: Tenant, upload: Upload | None, vectors: list[bytes]
    ) -> tuple[str, float] | None:
        """Return the name of the most similar voice but the one that is replaced."""
        with self._store.database.read() as db:
            rows = voice_timbre.of_tenant(db, tenant.name, MAX_COMPARED)
        rows = [(number, one) for number, kept in rows for one in timbre.split(kept)]
        close: dict[int, float] = {}
        for start in range(0, len(rows), _AT_ONCE):
            numbers, others = zip(*rows[start : start + _AT_ONCE], strict=True)
            each = [timbre.similarities(vector, others) for vector in vectors]
            found = np.max(each, axis=0)
            for at in (found >= SAME_FROM).nonzero()[0]:
                number = numbers[at]
                close[number] = max(close.get(number, 0.0), float(found[at]))
        nearest = sorted(close, key=close.__getitem__, reverse=True)[:_MOST_NAMED]
        with self._store.database.read() as db:
            named = voice_timbre.names(db, nearest)
        own = None if upload is None else fold(upload.name)
        for number in nearest:
            name, name_key = named.get(number, ("", own))
            if name_key != own:
                return name, close[number]
        return None

    def _doubt(
        self, tenant: Tenant, upload: Upload, vectors: list[bytes]
    ) -> str | None:
        """Return why a clip and its consent recording are not one person's, or None."""
        if not is_consent_id(upload.consent):
            return None
        try:
            consent = self._store.consents.get(upload.consent, tenant.name)
        except errors.ConsentNotFoundError:  # registering says so
            return None
        try:
            audio = self._store.read_audio(consent.audio_sha256)
        except errors.SourceCorruptError:
            audio = None
        if audio is None:
            return "the recording is lost; record it again"
        if not (theirs := self._encoder.vectors(audio)):
            return None
        similarity = float(timbre.similarities(theirs[0], vectors).min())
        if similarity >= OTHER_BELOW:
            return None
        said = f"the clip sounds unlike the person in that recording ({similarity:.2f})"
        return f"{said}; record one of them again"

    def _keep(self, number: int, audio: ReferenceAudio, vectors: list[bytes]) -> None:
        kept = b"".join(vectors) or voice_timbre.NOTHING
        with self._store.database.write() as db:
            voice_timbre.keep(db, number, audio.audio_sha256, kept)

    async def _hear_regularly(self) -> None:
        num_rounds = 0
        last = await self._surely(self._store.last_generation)
        # Begins anywhere: other servers hear the same voices.
        begin = secrets.randbelow(last + 1)
        await self._hear(begin, last)
        await self._hear(0, begin)
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            num_rounds += 1
            # All of them now and then: one may be in reach again, or repaired.
            after = 0 if num_rounds % _ROUNDS_OF_NEW == 0 else last
            newest = await self._surely(self._store.last_generation)
            await self._hear(after, newest)
            last = max(last, newest)

    async def _hear(self, after: int, last: int) -> None:
        while after < last:
            after = await self._surely(self._hear_next, after)

    async def _surely(self, function: Callable[..., int], *args: int) -> int:
        """Return what a function returns once the catalogue answers."""
        while True:
            try:
                return await self._threads.run(function, *args)
            except Exception as exc:  # noqa: BLE001
                message = "No voice is heard: %s"
                throttled.warn_of("hearing", message, errors.log_text_of(exc))
            await asyncio.sleep(_LOOK_SECONDS)

    def _hear_next(self, after: int) -> int:
        """Hear a voice behind a generation, if there is one; return what is next."""
        with self._store.database.read() as db:
            number, sha = voice_timbre.next_unheard(db, after)
        if sha is None:
            return number
        try:
            audio = self._store.read_audio(sha)
            if audio is not None:
                self._keep(number, audio, self._encoder.vectors(audio))
        except Exception as exc:  # noqa: BLE001
            message = "A voice is not heard: %s"
            throttled.warn_of("hearing one", message, errors.log_text_of(exc))
        return number


class Speech(CachedServingSpeech):
    """Speech by voices that are compared when they are registered."""

    _comparison: Comparison | None = None

    def _restore_uploaded_speakers(self) -> None:
        """Open the storage, if there is what compares voices."""
        policy = load_settings().similarity
        # Before the storage is open, where an error leaves nothing behind.
        encoder = None if policy == "off" else timbre.TimbreEncoder()
        super()._restore_uploaded_speakers()
        if encoder is not None:
            store, refuses = self.speakers.store, policy == "refuse"
            self._comparison = Comparison(store, encoder, refuses=refuses)
            self.speakers.uploads.compare = self._comparison.compare

    def shutdown(self) -> None:
        """Stop to hear voices, and everything else."""
        if self._comparison is not None:
            self._comparison.shutdown()
        super().shutdown()
