"""Voices out of a store and into one, as bundles."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from vllm_tts_cache.audio.decode import DecodedAudio, cut, decode
from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.names import MAX_NAME_CHARS
from vllm_tts_cache.catalogue.records import (
    Identity,
    NewSpeaker,
    SpeakerRecord,
    pack_embedding,
    unpack_embedding,
)
from vllm_tts_cache.errors import (
    ConsentInUseError,
    ConsentNotFoundError,
    EncodingCorruptError,
    InvalidBundleError,
    SpeakerExistsError,
    SpeakerNotFoundError,
    StorageError,
)
from vllm_tts_cache.files import publish_once, storage_errors
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.bundle_format import Bundle, BundledConsent, BundledVoice
from vllm_tts_cache.store.consents import ConsentRecord
from vllm_tts_cache.store.encoding import (
    EncodingKey,
    encoding_from_bytes,
    encoding_to_bytes,
)
from vllm_tts_cache.store.registering import Registered
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import ALONE, DEFAULT_TENANT, Limits, Tenant

Check = Callable[[str, str | None], None]
CheckAudio = Callable[[ReferenceAudio, str | None], object]
CheckEmbedding = Callable[[tuple[float, ...]], object]
OnConflict = Literal["fail", "replace", "rename"]

KEY_FILE = "bundle.key"
_KEY_BYTES = 32
_MAX_RENAMES = 1000
_MAX_ENCODINGS = 32
_RESERVED = 1024 * 1024  # for ``voice.json``, and the directory
# Fields of a voice that a bundle has as the catalogue has them.
_AS_REGISTERED = (
    "consent",
    "ref_text",
    "description",
    "language",
    "labels",
    "file_size",
    "mime_type",
    "expires_at",
)
# What is in a bundle has been an upload: a file without loss is larger than it was.
_LIMITS = replace(DEFAULT_LIMITS, max_bytes=bundle_format.MAX_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of a bundle.

    Attributes:
        done: The registration; what it replaced is still to be deleted.
        num_kept: Encodings that were taken, or were there.
        num_left: Encodings that were not taken: nobody vouches for them.
    """

    done: Registered
    num_kept: int
    num_left: int


class Bundles:
    """Exports and imports; for threads, as it reads and writes whole files.

    Args:
        key: Signs what is exported; encodings are taken of bundles that it signed.
            Empty for a key of this directory's own.
    """

    def __init__(self, store: SpeakerStore, key: str):
        self._store = store
        self._given_key = key.encode()

    def export(
        self, name: str, tenant: str = DEFAULT_TENANT
    ) -> tuple[SpeakerRecord, bytes]:
        """Return a tenant's voice and its bundle.

        Raises:
            SpeakerNotFoundError: There is none.
            StorageError: Its audio cannot be read, or it is too large.
        """
        found = self._store.find(name, tenant)
        if found is None:
            raise SpeakerNotFoundError(name)
        record, sha = found.record, found.record.audio_sha256
        if sha is None:
            embedding = self._store.speaker_embedding(record)
            if embedding is None:  # deleted or replaced a moment ago
                raise SpeakerNotFoundError(record.name)
            files = {bundle_format.EMBEDDING: pack_embedding(embedding)}
        else:
            files = self._audio("audio", sha, record)
        consent = self._consent(record)
        if consent is not None:
            files |= self._audio("consent", consent.audio_sha256, record)
        # What does not fit is encoded again where it arrives.
        room = bundle_format.MAX_BYTES - _RESERVED - sum(map(len, files.values()))
        for fingerprint in sorted(found.fingerprints)[:_MAX_ENCODINGS]:
            key = EncodingKey(audio_sha256=str(sha), encoder_fingerprint=fingerprint)
            encoding = None
            with suppress(EncodingCorruptError):  # it is encoded again, here and there
                encoding = self._store.read(key)
            blob = b"" if encoding is None else encoding_to_bytes(key, encoding)
            if blob and len(blob) <= room:
                files[f"encodings/{fingerprint}.safetensors"] = blob
                room -= len(blob)
        return record, bundle_format.write(_told(record, consent), files, self._key())

    def import_voice(
        self,
        data: bytes,
        *,
        check: Check = lambda _name, _ref_text: None,
        check_audio: CheckAudio = lambda _audio, _ref_text: None,
        check_embedding: CheckEmbedding = lambda _embedding: None,
        name: str | None = None,
        on_conflict: OnConflict = "fail",
        tenant: Tenant = ALONE,
    ) -> Imported:
        """Register the voice of a bundle, whole or not at all.

        Of a bundle that the key signed, the voice and its consent recording keep their
        ids and dates, where no other has those ids.

        Args:
            data: The bundle.
            check: Refuses a name and a transcript that the model cannot have.
            check_audio: Refuses a clip that may not be registered.
            check_embedding: Refuses an embedding that the model cannot have.
            name: What it is to be called; None for what it is called in the bundle.
            on_conflict: What to do where the name is taken.
            tenant: Whose voice it becomes.

        Raises:
            InvalidBundleError: It is none that can be used.
            SpeakerRequestError: It cannot be registered.
            StorageError: The disk or the catalogue failed.
        """
        bundle = bundle_format.read(data, self._key())
        audio, sha = _audio_of(bundle), bundle.voice.audio_sha256
        if sha != (None if audio is None else audio.audio.audio_sha256):
            raise InvalidBundleError("its audio is not the one that it names")
        # First all that may be wrong with it: then nothing has to be deleted again.
        new = _new(bundle, audio, name or bundle.voice.name, tenant.name)
        check(new.name, new.ref_text)
        if audio is not None:
            check_audio(audio.audio, new.ref_text)
        if new.embedding is not None:
            check_embedding(new.embedding)
        consent, is_added = self._kept_consent(bundle, tenant)
        if consent is not None:
            new = replace(new, consent=consent.consent_id)
        try:
            done = self._register(new, audio, on_conflict, tenant.limits)
        except Exception:
            if consent is not None and is_added:
                # Another import may have found it, and stand on it.
                with suppress(ConsentInUseError, ConsentNotFoundError):
                    delete = self._store.consents.delete
                    self._store.remove_files(delete(consent.consent_id, tenant.name))
            raise
        kept, left = self._take_encodings(bundle, sha)
        return Imported(done=done, num_kept=kept, num_left=left)

    def _register(
        self,
        new: NewSpeaker,
        audio: DecodedAudio | None,
        on_conflict: OnConflict,
        limits: Limits,
    ) -> Registered:
        register = self._store.registrations.register
        if on_conflict == "replace":
            return register(new, audio, limits=limits)
        if on_conflict == "fail":
            return register(new, audio, is_new=True, limits=limits)
        for number in range(1, _MAX_RENAMES):
            suffix = f" ({number})" if number > 1 else ""
            name = new.name[: MAX_NAME_CHARS - len(suffix)] + suffix
            if self._store.find(name, new.tenant) is None:
                with suppress(SpeakerExistsError):  # it was taken meanwhile
                    named = replace(new, name=name)
                    return register(named, audio, is_new=True, limits=limits)
        raise SpeakerExistsError(new.name)

    def _take_encodings(self, bundle: Bundle, sha: str | None) -> tuple[int, int]:
        """Take those that are missing here, if somebody vouches for them."""
        found = bundle.encodings()
        if not bundle.is_ours or sha is None:
            return 0, len(found)
        num_kept = 0
        for fingerprint, blob in found.items():
            key = EncodingKey(audio_sha256=sha, encoder_fingerprint=fingerprint)
            # The voice is registered; what fails here is encoded again.
            with suppress(EncodingCorruptError, StorageError):
                encoding = encoding_from_bytes(blob, key)
                if self._store.is_stored(key) or self._store.publish(key, encoding):
                    num_kept += 1
        return num_kept, len(found) - num_kept

    def _kept_consent(
        self, bundle: Bundle, tenant: Tenant
    ) -> tuple[ConsentRecord | None, bool]:
        """The recording of the bundle here, and whether it was not there before."""
        told, audio = bundle.voice.consent_recording, _decoded(bundle, "consent")
        if told is None or audio is None:
            return None, False
        consents, whose = self._store.consents, tenant.name
        known = consents.of_audio(audio.audio.audio_sha256, whose)
        if known is not None:
            return known, False
        identity = _identity(bundle, told.id, told.created_at)
        kept = consents.add(
            told.name, told.language, audio, whose, tenant.limits, identity
        )
        return kept, True

    def _consent(self, record: SpeakerRecord) -> ConsentRecord | None:
        if record.consent_id is None:
            return None
        with suppress(ConsentNotFoundError):  # it went a moment ago
            return self._store.consents.get(record.consent_id, record.tenant)
        return None

    def _audio(self, what: str, sha: str, record: SpeakerRecord) -> dict[str, bytes]:
        if (file := self._store.audio_for_client(sha)) is None:
            found = self._store.find(record.speaker_id, record.tenant)
            if found is None or found.record.audio_sha256 != sha:
                # Deleted or replaced a moment ago.
                raise SpeakerNotFoundError(record.name)
            raise StorageError(f"Audio {sha} is not stored; register the voice again.")
        data, media_type = file
        return {f"{what}.{media_type.removeprefix('audio/')}": data}

    def _key(self) -> bytes:
        """The key; of the directory's own, made when it is first needed."""
        if self._given_key:
            return self._given_key
        path = self._store.directory / KEY_FILE
        with storage_errors(path):
            publish_once(path, secrets.token_hex(_KEY_BYTES).encode())
            return path.read_bytes()


def _told(record: SpeakerRecord, consent: ConsentRecord | None) -> BundledVoice:
    recording = None
    if consent is not None:
        recording = BundledConsent(
            name=consent.name,
            language=consent.language,
            id=consent.consent_id,
            created_at=consent.created_at,
        )
    several = record.num_clips > 1
    return BundledVoice(
        **{field: getattr(record, field) for field in _AS_REGISTERED},
        format=bundle_format.CLIPS_VERSION if several else bundle_format.FORMAT_VERSION,
        id=record.speaker_id,
        name=record.name,
        audio_sha256=record.audio_sha256,
        files={},
        created_at=record.created_at,
        updated_at=record.updated_at,
        consent_recording=recording,
        clip_starts=record.clip_starts if several else msgspec.UNSET,
    )


def _new(
    bundle: Bundle, audio: DecodedAudio | None, name: str, tenant: str
) -> NewSpeaker:
    """Return what is to be registered.

    Raises: InvalidBundleError, InvalidSpeakerError; there is no sample, or two.
    """
    told, embedding = bundle.voice, bundle.files.get(bundle_format.EMBEDDING)
    if embedding is not None and len(embedding) % 4:
        raise InvalidBundleError("its embedding is cut off")
    sample: dict[str, Any] = {}
    if audio is not None:
        sample = {
            "audio_sha256": audio.audio.audio_sha256,
            "num_samples": audio.audio.num_samples,
            "sample_rate_hz": audio.audio.sample_rate_hz,
            "clip_starts": audio.audio.clip_starts,
        }
    return NewSpeaker(
        **sample,
        **{field: getattr(told, field) for field in _AS_REGISTERED},
        embedding=None if embedding is None else unpack_embedding(embedding),
        tenant=tenant,
        name=name,
        identity=_identity(bundle, told.id, told.created_at, told.updated_at),
    )


def _identity(
    bundle: Bundle,
    public_id: str | None,
    created_at: float | None,
    updated_at: float | None = None,
) -> Identity | None:
    if not bundle.is_ours or public_id is None or created_at is None:
        return None
    return Identity(public_id, created_at, updated_at)


def _audio_of(bundle: Bundle) -> DecodedAudio | None:
    """Decode the voice's audio, and cut it into its clips.

    Raises: InvalidAudioError, InvalidBundleError.
    """
    decoded, starts = _decoded(bundle, "audio"), bundle.voice.clip_starts
    if decoded is None or isinstance(starts, msgspec.UnsetType):
        return decoded
    try:
        return cut(decoded, starts)
    except ValueError as exc:
        raise InvalidBundleError(
            f"its clips are not those of its audio: {exc}"
        ) from exc


def _decoded(bundle: Bundle, what: str) -> DecodedAudio | None:
    """Decode an entry. Raises: InvalidAudioError."""
    data = bundle.audio(what)
    return None if data is None else decode(data, _LIMITS)
