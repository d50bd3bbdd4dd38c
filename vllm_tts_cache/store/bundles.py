"""Exports and imports voices as bundles."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import DecodedAudio, cut, decode
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue import records
from vllm_tts_cache.catalogue.names import MAX_NAME_CHARS
from vllm_tts_cache.files import publish_once, storage_errors
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.bundle_format import Bundle, BundledConsent, BundledVoice
from vllm_tts_cache.store.consents import ConsentRecord, NewConsent
from vllm_tts_cache.store.encoding import EncodingKey, encoding_to_bytes
from vllm_tts_cache.store.registering import Registered
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import ALONE, DEFAULT_TENANT, Tenant

Check = Callable[[str, str | None, Mapping[str, Any]], None]
CheckAudio = Callable[[ReferenceAudio, str | None], object]
CheckEmbedding = Callable[[tuple[float, ...]], object]
OnConflict = Literal["fail", "replace", "rename"]

KEY_FILE = "bundle.key"
_KEY_BYTES = 32
_MAX_RENAMES = 1000
_MAX_ENCODINGS = 32
_RESERVED = 1024 * 1024  # for ``voice.json`` and the ZIP directory
# Fields that a bundle has exactly as the catalogue does.
_AS_REGISTERED = (
    *("consent", "ref_text", "description", "language", "labels"),
    *("file_size", "mime_type", "expires_at"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import.

    Attributes:
        done: What it replaced is still to be deleted.
        num_kept: Encodings of the bundle that are stored now.
        num_left: The others: our key did not sign the bundle.
    """

    done: Registered
    num_kept: int
    num_left: int


class Bundles:
    """Exports and imports bundles; reads and writes whole files: call it in a thread.

    The key signs exports; encodings are taken only from bundles that it signed. It is
    empty for the directory's own key.
    """

    def __init__(self, store: SpeakerStore, key: str):
        self._store = store
        self._given_key = key.encode()

    def export(
        self, name: str, tenant: str = DEFAULT_TENANT
    ) -> tuple[records.SpeakerRecord, bytes]:
        """Return a tenant's voice and its bundle.

        Raises:
            SpeakerNotFoundError: The tenant has no such voice.
            StorageError: Its audio is not stored, or cannot be read.
        """
        found = self._store.find(name, tenant)
        if found is None:
            raise errors.SpeakerNotFoundError(name)
        record, sha = found.record, found.record.audio_sha256
        if sha is None:
            embedding = self._store.speaker_embedding(record)
            if embedding is None:  # deleted or replaced a moment ago
                raise errors.SpeakerNotFoundError(record.name)
            files = {bundle_format.EMBEDDING: records.pack_embedding(embedding)}
        else:
            files = self._audio("audio", sha, record)
        consent = None
        if record.consent_id is not None:
            with suppress(errors.ConsentNotFoundError):  # deleted a moment ago
                consent = self._store.consents.get(record.consent_id, record.tenant)
        if consent is not None:
            files |= self._audio("consent", consent.audio_sha256, record)
        # Encodings that do not fit are left out; the importing server makes them.
        room = bundle_format.MAX_BYTES - _RESERVED - sum(map(len, files.values()))
        for fingerprint in sorted(found.fingerprints)[:_MAX_ENCODINGS]:
            key = EncodingKey(audio_sha256=str(sha), encoder_fingerprint=fingerprint)
            encoding = None
            with suppress(errors.EncodingCorruptError):  # left out, and made again
                encoding = self._store.read(key)
            blob = b"" if encoding is None else encoding_to_bytes(key, encoding)
            if blob and len(blob) <= room:
                files[f"encodings/{fingerprint}.safetensors"] = blob
                room -= len(blob)
        return record, bundle_format.write(_voice(record, consent), files, self._key())

    def import_voice(
        self,
        data: bytes,
        *,
        check: Check = lambda _name, _ref_text, _extras: None,
        check_audio: CheckAudio = lambda _audio, _ref_text: None,
        check_embedding: CheckEmbedding = lambda _embedding: None,
        name: str | None = None,
        on_conflict: OnConflict = "fail",
        tenant: Tenant = ALONE,
        key: str | None = None,
    ) -> Imported:
        """Register the voice of a bundle, whole or not at all.

        If the key signed the bundle, the voice and its consent recording keep their ids
        and dates, unless another voice or recording has the id.

        The checks raise for a name, transcript, extras or embedding that the model
        cannot use, and for a clip that may not be registered. ``name`` is None for the
        one in the bundle, ``key`` the ``Idempotency-Key`` of the request.

        Raises:
            InvalidBundleError: The bundle cannot be used.
            SpeakerRequestError: The voice cannot be registered.
            StorageError: The disk or the catalogue failed.
        """
        bundle = bundle_format.read(data, self._key())
        audio = _audio_of(bundle)
        # All checks come before anything is stored, so that a failure undoes nothing.
        new = _new(bundle, audio, name or bundle.voice.name, tenant.name)
        asked = tenant.name, bundle.voice, name, on_conflict
        new = replace(new, idempotency_key=records.IdempotencyKey.of(key, *asked))
        check(new.name, new.ref_text, new.extras)
        if audio is not None:
            check_audio(audio.audio, new.ref_text)
        if new.embedding is not None:
            check_embedding(new.embedding)
        found = bundle.encodings()
        # Whole as they were read to be signed; a worker checks what it reads again.
        kept = found if bundle.is_ours and audio is not None else {}
        stored = self._store.stored_artifacts([sha := str(new.audio_sha256)])[sha]
        register = partial(
            self._store.registrations.register,
            limits=tenant.limits,
            recording=_recording_of(bundle, tenant.name),
            encodings={name: kept[name] for name in kept.keys() - stored},
        )
        done = self._register(register, new, audio, on_conflict)
        return Imported(done=done, num_kept=len(kept), num_left=len(found) - len(kept))

    def _register(
        self,
        register: Callable[..., Registered],
        new: records.NewSpeaker,
        audio: DecodedAudio | None,
        on_conflict: OnConflict,
    ) -> Registered:
        if on_conflict != "rename":
            return register(new, audio, is_new=on_conflict == "fail")
        for number in range(1, _MAX_RENAMES):
            suffix = f" ({number})" if number > 1 else ""
            name = new.name[: MAX_NAME_CHARS - len(suffix)] + suffix
            if self._store.find(name, new.tenant) is not None:
                continue
            # Taken meanwhile, or an alias is: who has it keeps it.
            for extras in (new.extras, {**new.extras, "aliases": None}):
                with suppress(errors.SpeakerExistsError):
                    copy = replace(new, name=name, extras=extras)
                    return register(copy, audio, is_new=True)
        raise errors.SpeakerExistsError(new.name)

    def _audio(
        self, what: str, sha: str, record: records.SpeakerRecord
    ) -> dict[str, bytes]:
        if (file := self._store.audio_for_client(sha)) is None:
            found = self._store.find(record.speaker_id, record.tenant)
            if found is None or found.record.audio_sha256 != sha:
                # Deleted or replaced a moment ago.
                raise errors.SpeakerNotFoundError(record.name)
            reason = f"Audio {sha} is not stored; register the voice again."
            raise errors.StorageError(reason)
        data, media_type = file
        return {f"{what}.{media_type.removeprefix('audio/')}": data}

    def _key(self) -> bytes:
        """Return the given key, else the directory's, which the first call makes."""
        if self._given_key:
            return self._given_key
        path = self._store.directory / KEY_FILE
        with storage_errors(path):
            publish_once(path, secrets.token_hex(_KEY_BYTES).encode())
            return path.read_bytes()


def _voice(
    record: records.SpeakerRecord, consent: ConsentRecord | None
) -> BundledVoice:
    recording = None
    if consent is not None:
        id_, created_at = consent.consent_id, consent.created_at
        recording = BundledConsent(consent.name, consent.language, id_, created_at)
    several = record.num_clips > 1
    return BundledVoice(
        **{field: getattr(record, field) for field in _AS_REGISTERED},
        extras=record.extras,
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
) -> records.NewSpeaker:
    """Return the speaker that a bundle registers.

    Raises: InvalidBundleError, InvalidSpeakerError: The bundle has no sample, or two.
    """
    voice, embedding = bundle.voice, bundle.files.get(bundle_format.EMBEDDING)
    if embedding is not None and len(embedding) % 4:
        raise errors.InvalidBundleError("its embedding is cut off")
    sample: dict[str, Any] = {}
    if audio is not None:
        names = "audio_sha256", "num_samples", "sample_rate_hz", "clip_starts"
        sample = {field: getattr(audio.audio, field) for field in names}
    return records.NewSpeaker(
        **sample,
        **{field: getattr(voice, field) for field in _AS_REGISTERED},
        extras={**dict.fromkeys(records.EXTRAS), **voice.extras},
        embedding=None if embedding is None else records.unpack_embedding(embedding),
        tenant=tenant,
        name=name,
        identity=_identity(bundle, voice.id, voice.created_at, voice.updated_at),
    )


def _recording_of(bundle: Bundle, tenant: str) -> NewConsent | None:
    """Return the consent recording of a bundle. Raises: InvalidAudioError."""
    recording, audio = bundle.voice.consent_recording, _decoded(bundle, "consent")
    if recording is None or audio is None:
        return None
    return NewConsent(
        name=recording.name,
        language=recording.language,
        audio=audio,
        tenant=tenant,
        identity=_identity(bundle, recording.id, recording.created_at),
    )


def _identity(
    bundle: Bundle,
    public_id: str | None,
    created_at: float | None,
    updated_at: float | None = None,
) -> records.Identity | None:
    if not bundle.is_ours or public_id is None or created_at is None:
        return None
    return records.Identity(public_id, created_at, updated_at)


def _audio_of(bundle: Bundle) -> DecodedAudio | None:
    """Decode the voice's audio, and cut it into its clips.

    The audio gets the address that the bundle names.

    Raises: InvalidAudioError, InvalidBundleError.
    """
    decoded, starts = _decoded(bundle, "audio"), bundle.voice.clip_starts
    sha = bundle.voice.audio_sha256
    if decoded is not None and not isinstance(starts, msgspec.UnsetType):
        try:
            decoded = cut(decoded, starts)
        except ValueError as exc:
            reason = f"its clips are not those of its audio: {exc}"
            raise errors.InvalidBundleError(reason) from exc
    if sha == (None if decoded is None else decoded.audio.audio_sha256):
        return decoded
    if decoded is None or sha is None or not bundle.is_ours:
        raise errors.InvalidBundleError("its audio is not the one that it names")
    # An upload whose decoder has changed keeps its address of before, by which its
    # encodings are stored. Only a signed bundle may name such an address: otherwise a
    # client could give its own clip the address of another one, and be spoken instead.
    audio = replace(decoded.audio, audio_sha256=sha)
    return replace(decoded, audio=audio, decodes_otherwise=True)


def _decoded(bundle: Bundle, what: str) -> DecodedAudio | None:
    """Decode an entry. Raises: InvalidAudioError."""
    data = bundle.audio(what)
    # A lossless file may be larger than the upload that it was decoded from.
    return None if data is None else decode(data, bundle_format.MAX_BYTES)
