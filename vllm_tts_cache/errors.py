"""Every exception this package raises on purpose.

They are classed by who can fix them, and carry the HTTP status of the answer: a new
error belongs under the branch of those who can fix it.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar


class TTSCacheError(Exception):
    """Base of all errors raised by vllm-tts-cache.

    Attributes:
        http_status: The answer's status; a subclass names it as ``status=404``.
        text: The message of a class that always says the same.
        retry_after_seconds: When to try again; only on errors that pass by themselves.
        details: Fields of the answer beside ``error``; only on some errors.
    """

    http_status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    text: ClassVar[str] = ""
    _log_text: str | None = None  # replaces the message in logs

    def __init_subclass__(cls, status: int | None = None) -> None:
        super().__init_subclass__()
        if status is not None:
            cls.http_status = HTTPStatus(status)

    def __init__(self, message: str | None = None):
        super().__init__(self.text if message is None else message)

    @property
    def log_text(self) -> str:
        """The message for logs, without names and texts of voices."""
        return self._log_text or str(self)


def log_text_of(error: BaseException) -> str:
    """Return an error's text for logs: ``log_text`` of ours, else its ``repr``."""
    return error.log_text if isinstance(error, TTSCacheError) else repr(error)


class ConfigError(TTSCacheError):
    """A setting is wrong; the operator can fix it. The message names the variable."""


class ConnectionSettingError(ConfigError):
    """A variable names a proxy, or certificates, that no client can use."""


class NoCatalogueError(ConfigError):
    """No server has stored voices where the settings point; or they point wrongly."""


class SpeakerRequestError(TTSCacheError, status=400):
    """A request is wrong, and its sender can correct it (4xx)."""

    @property
    def log_text(self) -> str:
        """The class alone: the message is for the sender, and quotes the request."""
        return type(self).__name__


class InvalidAudioError(SpeakerRequestError):
    """The reference audio cannot be used."""

    def __init__(self, reason: str):
        super().__init__(f"The reference audio cannot be used: {reason}")
        self.reason = reason


class LowQualityError(SpeakerRequestError):
    """The clip's quality is below the operator's minimum (400)."""

    def __init__(self, reasons: Sequence[str]):
        super().__init__(
            "This server registers no clip of this quality (SPEAKER_MIN_QUALITY). "
            + " ".join(reasons)
        )


class InvalidSpeakerError(SpeakerRequestError):
    """A field of a registration or of a speech request is wrong."""

    def __init__(self, field: str, reason: str):
        super().__init__(f"Invalid {field}: {reason}")
        self.field = field
        self.reason = reason


def _quoted(text: str) -> str:
    """Quote a text that a client sent, which may be anything."""
    return repr(text if len(text) <= 200 else f"{text[:200]}…")


# What OpenAI's clients send where nobody has chosen.
_OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova"),
    *("onyx", "sage", "shimmer", "verse"),
)


class SpeakerNotFoundError(SpeakerRequestError, status=404):
    """No speaker is registered under this name."""

    def __init__(self, name: str):
        hint = ""
        if (named := name.strip().lower()) in _OPENAI_VOICES:
            hint = (
                "It is a voice of OpenAI's; to speak with one of yours under this "
                f'name, PATCH /v1/audio/voices/NAME with {{"aliases": ["{named}"]}}. '
            )
        super().__init__(
            f"Voice {_quoted(name)} is not registered. {hint}Register it with "
            "POST /v1/audio/voices (name, consent, audio_sample), or see "
            "GET /v1/audio/voices for the registered ones."
        )


class UnauthorizedError(SpeakerRequestError, status=401):
    """The server has tenants, and the request has no tenant's key (401)."""

    text = (
        "This server wants an API key that it knows: send it as "
        "'Authorization: Bearer KEY'."
    )


class AdminKeyError(SpeakerRequestError, status=403):
    """An administrator's key was given where a tenant's is needed (403)."""

    text = (
        "An administrator's key has no voices: it shows the counts of all tenants "
        "at GET /v1/audio/speaker_cache. Use the key of a tenant."
    )


_IS_IMMUTABLE = (
    "and the registration policy is 'immutable'. Delete it first, or choose another "
    "name."
)
CHOOSE_ANOTHER = "and keeps its name. Choose another one, or delete that voice first."


class SpeakerExistsError(SpeakerRequestError, status=409):
    """The name is taken; ``hint`` says why that is a conflict, and the next step."""

    def __init__(self, name: str, hint: str = _IS_IMMUTABLE):
        super().__init__(f"Voice {name!r} is already registered {hint}")


class AlreadyDoneError(SpeakerRequestError, status=409):
    """The request was done before, and its voice is deleted since (409)."""

    def __init__(self, speaker_id: str):
        super().__init__(
            f"Voice {speaker_id!r}, which the first request with this Idempotency-Key "
            "registered, is deleted. Send another key to register it again."
        )
        self.speaker_id = speaker_id


class ConsentRequiredError(SpeakerRequestError):
    """The operator requires a consent recording for each voice; none was named."""

    text = (
        "Invalid consent: this server registers a voice only with a consent "
        "recording. Upload one with POST /v1/audio/voice_consents (name, language, "
        "recording), and send its id as consent."
    )


class ConsentNotFoundError(SpeakerRequestError, status=404):
    """There is no consent recording with this id (404)."""

    def __init__(self, consent_id: str):
        super().__init__(
            f"There is no consent recording {_quoted(consent_id)}. GET "
            "/v1/audio/voice_consents lists those that there are."
        )


class ConsentInUseError(SpeakerRequestError, status=409):
    """A consent recording is not deleted while voices name it as their consent."""

    def __init__(self, consent_id: str, voices: Sequence[tuple[str, str]]):
        names = ", ".join(repr(name) for _, name in voices)
        super().__init__(
            f"Voices stand on the consent recording {consent_id!r}: {names}. Delete "
            "them first; nothing was changed."
        )
        self.details = {"voices": [{"id": id_, "name": name} for id_, name in voices]}


class SpeakerLimitError(SpeakerRequestError, status=409):
    """The catalogue, or the tenant, has as many speakers as it may have (409)."""

    what = "voices are registered"

    def __init__(self, limit: int, *, is_tenants: bool = False):
        raised = "raise SPEAKER_MAX_UPLOADED (0 = no limit)"
        if is_tenants:
            raised = "have max_voices of this key's tenant raised"
        super().__init__(
            f"{limit} {self.what}, which is the limit. Delete one, or {raised}."
        )


class ConsentLimitError(SpeakerLimitError):
    """There are as many consent recordings as there may be (409)."""

    what = "consent recordings are kept"


class AudioBudgetError(SpeakerRequestError, status=409):
    """The clip exceeds the byte limit of all or of a tenant's reference audio (409)."""

    def __init__(self, max_bytes: int, *, is_tenants: bool = False):
        raised = "raise SPEAKER_CACHE_AUDIO_MAX_BYTES"
        if is_tenants:
            raised = "have max_audio_bytes of this key's tenant raised"
        super().__init__(
            f"The reference audio of the registered voices may take {max_bytes} "
            "bytes, and this clip no longer fits; nothing was changed. Delete a voice, "
            f"send a shorter clip, or {raised}."
        )


class InvalidBundleError(SpeakerRequestError):
    """The file holds no voice that can be imported; nothing was changed."""

    def __init__(self, reason: str):
        super().__init__(f"Invalid bundle: {reason}; nothing was changed.")


class DownloadsOffError(SpeakerRequestError, status=403):
    """The operator has turned downloads of reference audio off (403)."""

    text = "This server does not give reference audio back (SPEAKER_AUDIO_DOWNLOAD=0)."


class RequestTooLargeError(SpeakerRequestError, status=413):
    """The body of a request has more bytes than the route takes (413)."""

    def __init__(self, max_bytes: int):
        super().__init__(
            f"The request body is larger than {max_bytes / 1024**2:.4g} MiB, which is "
            "the most that this route takes; nothing was changed. Send less; a clip "
            "can be cut, or compressed (FLAC, MP3)."
        )


class ServerFaultError(TTSCacheError):
    """The request was fine; this server, its disk or its worker failed (5xx)."""


class NoTenantError(ServerFaultError):
    """The tenant of a request is not known, so no voice is looked up for it."""

    text = "The tenant of this request is not known, so no voice was looked up for it."


class ServerBusyError(ServerFaultError, status=503):
    """A queue is full, too many calls run at once, or the server stops (503)."""

    retry_after_seconds = 2

    def __init__(self, what: str):
        super().__init__(
            f"The server is busy: {what}. Try again in {self.retry_after_seconds} s."
        )


class DeletionPendingError(ServerFaultError, status=503):
    """A voice is deleted, but its deletion is not finished (503)."""

    retry_after_seconds = 1

    def __init__(self, name: str, *, files_removed: bool, waiting_for: int):
        files = "gone" if files_removed else "not yet removed"
        left = f"{files}, API servers that have not confirmed: {waiting_for}."
        super().__init__(
            f"Voice {name!r} is deleted and answers no request any more, but not all "
            f"of it is gone: its files are {left} It goes on by itself. Repeat the "
            f"DELETE in {self.retry_after_seconds} s to learn how far it is."
        )
        self._log_text = (
            f"A voice is deleted, but not all of it is gone: its files are {left}"
        )
        self.details = {
            "deletion": {"files_removed": files_removed, "waiting_for": waiting_for}
        }


class StorageError(ServerFaultError):
    """The catalogue, the stored files or a tier of the cache failed."""


class StorageFullError(StorageError, status=507):
    """There is no space left where speakers are stored."""

    text = (
        "There is no space left where voices are stored or received; nothing was "
        "changed. Free some space, or point SPEAKER_SAMPLES_DIR (received files: "
        "TMPDIR) to another disk."
    )


class StorageBusyError(StorageError, status=503):
    """Another process has held the catalogue's write lock for too long (503)."""

    def __init__(self, retry_after_seconds: int):
        super().__init__(
            "Another process is writing to the directory where voices are stored and "
            "has not finished in time; nothing was changed. Try again in "
            f"{retry_after_seconds} s. If it stays like this, look for a process that "
            "hangs, or is stopped, with a file of SPEAKER_SAMPLES_DIR open."
        )
        self.retry_after_seconds = retry_after_seconds


class StorageUnavailableError(StorageError, status=503):
    """The database of the catalogue cannot be reached, or does not answer (503).

    Args:
        detail: What happened, for the operator: it may name hosts and users.
        was_cut_off: Whether a connection was refused or lost, so that a transaction on
            it may or may not be committed. Else the database was full or busy.
    """

    retry_after_seconds = 2

    def __init__(self, where: str, detail: str, *, was_cut_off: bool = True):
        super().__init__(
            "The voice catalogue is down: its PostgreSQL server does not answer as it "
            "should, and this server's log says why. Try again in "
            f"{self.retry_after_seconds} s."
        )
        self.detail = detail
        self.was_cut_off = was_cut_off
        self._log_text = f"The voice catalogue {where} is down: {detail}."


class ObjectStoreError(StorageError, status=503):
    """The object store does not answer, or not as it should (503).

    The ``detail`` is for the operator: it may name hosts and objects.
    """

    retry_after_seconds = 5

    def __init__(self, where: str, detail: str):
        super().__init__(
            "The object store where voices are kept does not answer as it should, and "
            "this server's log says why. Voices that this machine has a copy of still "
            f"speak. Try again in {self.retry_after_seconds} s."
        )
        self._log_text = f"The object store {where} is down: {detail}."


class EncodingCorruptError(StorageError):
    """Stored bytes do not match their key."""

    def __init__(self, key: str, reason: str):
        super().__init__(f"Encoding {key} is corrupt: {reason}")
        self.reason = reason


class SourceCorruptError(StorageError):
    """A stored source (audio or embedding) does not match its content address."""

    def __init__(self, source_sha256: str, reason: str):
        super().__init__(f"Stored source {source_sha256} is corrupt: {reason}")
        self.reason = reason


class EncodeError(ServerFaultError):
    """A reference encoder failed on a clip; a later call tries again."""


# Outages: what they hit is tried again, and is no fault of a clip.
AWAY = ObjectStoreError, StorageBusyError, StorageUnavailableError


class WorkerStorageError(StorageError, status=503):
    """A worker's bucket or catalogue does not answer (503); the text says which."""

    retry_after_seconds = 5


class NotStoredError(EncodeError, status=503):
    """An encoding was made and could not be stored; it is tried again (503)."""

    retry_after_seconds = 10
    text = (
        "The voice speaks, but its encoding could not be stored, and the log of the "
        "server says why. It is tried again."
    )


class GoneError(EncodeError):
    """Data that a request's prompt names was deleted before it ran: resolve it anew."""


class AudioGoneError(GoneError):
    """The reference audio is not stored (any more); a caller with it may store it."""

    text = "The reference audio is not stored (any more)."


class SpeakerReplacedError(GoneError, status=503):
    """Another clip was registered under the voice's name meanwhile (503)."""

    retry_after_seconds = 2

    def __init__(self, name: str):
        super().__init__(
            f"Voice {name!r} is being replaced: each time that this request had its "
            "encodings, another clip was registered under the name. Try again in "
            f"{self.retry_after_seconds} s."
        )
        what = "A voice was replaced each time that a request had its encodings."
        self._log_text = what


class EncodersChangedError(GoneError):
    """The workers have other encoders than this process knew of."""

    text = "The model was loaded anew, with other encoders. Try again."


class EncodeTimeoutError(ServerFaultError, status=503):
    """An encoding did not arrive in time; its encode may still be queued or running."""

    # The encoding may be stored by then; an earlier request waits for it again.
    retry_after_seconds = 10


class WorkerRPCError(ServerFaultError):
    """A worker answered an RPC with an error, or its answer cannot be read."""


class CheckpointError(TTSCacheError):
    """A model directory lacks what our encoders need; the operator can fix it."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"{path}: {reason}")


class RemoteError(TTSCacheError):
    """A server that our client called did not do what the client asked for."""


class ServerUnreachableError(RemoteError):
    """No server answers at the URL, or the connection broke."""

    def __init__(
        self,
        url: str,
        reason: str,
        hint: str = "Is the server running? Name another one with --url or "
        "SPEAKER_URL.",
    ):
        super().__init__(f"{url} does not answer: {reason.rstrip('.')}. {hint}")


class ServerAnswerError(RemoteError):
    """The server refused the request, or failed, and answered with ``status``."""

    def __init__(
        self, status: int, reason: str, retry_after_seconds: float | None = None
    ):
        super().__init__(f"{reason.rstrip('.')} (HTTP {status})")
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class NotThereError(ServerAnswerError):
    """The server has the route, and no voice or recording of the given name (404)."""


class RouteMissingError(ServerAnswerError):
    """The server runs without this plugin, or with a version that lacks the route."""

    def __init__(self, status: int, method: str, path: str):
        super().__init__(
            status,
            f"The server knows no {method} {path}. Is vllm-tts-cache loaded there, in "
            "this version? Check it with `vllm-tts-cache doctor`",
        )
