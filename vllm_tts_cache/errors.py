"""Every exception this package raises on purpose.

They are classed by who can fix them, and say what HTTP answers: a new error belongs
under the branch that says who that is.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar


class TTSCacheError(Exception):
    """Base of all errors raised by vllm-tts-cache.

    Args:
        message: Of those that always say the same it is the class's ``text``.

    Attributes:
        http_status: What a route answers.
        retry_after_seconds: When it is worth trying again, of what passes by itself.
    """

    http_status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR
    text: ClassVar[str] = ""
    _log_text: str | None = None  # in the place of the message

    def __init__(self, message: str | None = None):
        super().__init__(self.text if message is None else message)

    @property
    def log_text(self) -> str:
        """What a log may show: no name and no text of a voice."""
        return self._log_text or str(self)


def log_text_of(error: BaseException) -> str:
    """Return what a log may show of an error; of ours it is their ``log_text``."""
    return error.log_text if isinstance(error, TTSCacheError) else repr(error)


class ConfigError(TTSCacheError):
    """A setting is wrong; the operator can fix it. The message names the variable."""


class ConnectionSettingError(ConfigError):
    """A variable names a proxy, or certificates, that no client can use."""


class NoCatalogueError(ConfigError):
    """No server has stored voices where the settings say; or they say it wrongly."""


class SpeakerRequestError(TTSCacheError):
    """The caller can fix it (4xx)."""

    http_status = HTTPStatus.BAD_REQUEST

    @property
    def log_text(self) -> str:
        """The class alone: the message is for the caller, and quotes what was sent."""
        return type(self).__name__


class InvalidAudioError(SpeakerRequestError):
    """The reference audio cannot be used."""

    def __init__(self, reason: str):
        super().__init__(f"The reference audio cannot be used: {reason}")
        self.reason = reason


class LowQualityError(SpeakerRequestError):
    """The clip is worth less than the operator takes (400)."""

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


# Of what a client looked for, and may be anything.
_MAX_QUOTED = 200


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…")


class SpeakerNotFoundError(SpeakerRequestError):
    """No speaker is registered under this name."""

    http_status = HTTPStatus.NOT_FOUND

    def __init__(self, name: str):
        super().__init__(
            f"Voice {_quoted(name)} is not registered. Register it with "
            "POST /v1/audio/voices (name, consent, audio_sample), or see "
            "GET /v1/audio/voices for the registered ones."
        )


class UnauthorizedError(SpeakerRequestError):
    """The server has tenants, and the request no key of one (401)."""

    http_status = HTTPStatus.UNAUTHORIZED
    text = (
        "This server wants an API key that it knows: send it as "
        "'Authorization: Bearer KEY'."
    )


class AdminKeyError(SpeakerRequestError):
    """An administrator's key was given where a tenant's is needed (403)."""

    http_status = HTTPStatus.FORBIDDEN
    text = (
        "An administrator's key has no voices: it shows the counts of all tenants "
        "at GET /v1/audio/speaker_cache. Use the key of a tenant."
    )


_IS_IMMUTABLE = (
    "and the registration policy is 'immutable'. Delete it first, or choose another "
    "name."
)
CHOOSE_ANOTHER = "and keeps its name. Choose another one, or delete that voice first."


class SpeakerExistsError(SpeakerRequestError):
    """The name is taken.

    Args:
        hint: Why that is in the way, and what helps; ends the message.
    """

    http_status = HTTPStatus.CONFLICT

    def __init__(self, name: str, hint: str = _IS_IMMUTABLE):
        super().__init__(f"Voice {name!r} is already registered {hint}")


class ConsentRequiredError(SpeakerRequestError):
    """The operator wants a consent recording for each voice, and here is none."""

    text = (
        "Invalid consent: this server registers a voice only with a consent "
        "recording. Upload one with POST /v1/audio/voice_consents (name, language, "
        "recording), and send its id as consent."
    )


class ConsentNotFoundError(SpeakerRequestError):
    """There is no consent recording with this id (404)."""

    http_status = HTTPStatus.NOT_FOUND

    def __init__(self, consent_id: str):
        super().__init__(
            f"There is no consent recording {_quoted(consent_id)}. GET "
            "/v1/audio/voice_consents lists those that there are."
        )


# A setting, and what it is called in the entry of a tenant.
_MAX_VOICES = "SPEAKER_MAX_UPLOADED (0 = no limit)", "max_voices"
_MAX_AUDIO = "SPEAKER_CACHE_AUDIO_MAX_BYTES", "max_audio_bytes"


def _raised(limit: tuple[str, str], is_tenants: bool) -> str:
    setting, field = limit
    of_tenant = f"have {field} raised, of this key's tenant"
    return of_tenant if is_tenants else f"raise {setting}"


class ConsentInUseError(SpeakerRequestError):
    """Voices stand on the consent recording (409).

    Attributes:
        voices: Ids and names of some of them.
    """

    http_status = HTTPStatus.CONFLICT

    def __init__(self, consent_id: str, voices: Sequence[tuple[str, str]]):
        names = ", ".join(repr(name) for _, name in voices)
        super().__init__(
            f"Voices stand on the consent recording {consent_id!r}: {names}. Delete "
            "them first; nothing was changed."
        )
        self.voices = tuple(voices)


class SpeakerLimitError(SpeakerRequestError):
    """The registry holds as many speakers as it may, or as the tenant's may be."""

    http_status = HTTPStatus.CONFLICT
    what = "voices are registered"

    def __init__(self, limit: int, *, is_tenants: bool = False):
        raised = _raised(_MAX_VOICES, is_tenants)
        super().__init__(
            f"{limit} {self.what}, which is the limit. Delete one, or {raised}."
        )


class ConsentLimitError(SpeakerLimitError):
    """There are as many consent recordings as there may be (409)."""

    what = "consent recordings are kept"


class AudioBudgetError(SpeakerRequestError):
    """The reference audio of all voices may not take more bytes on disk (409)."""

    http_status = HTTPStatus.CONFLICT

    def __init__(self, max_bytes: int, *, is_tenants: bool = False):
        super().__init__(
            f"The reference audio of the registered voices may take {max_bytes} "
            "bytes, and this clip no longer fits; nothing was changed. Delete a voice, "
            f"send a shorter clip, or {_raised(_MAX_AUDIO, is_tenants)}."
        )


class InvalidBundleError(SpeakerRequestError):
    """The file holds no voice that can be imported; nothing was changed."""

    def __init__(self, reason: str):
        super().__init__(f"Invalid bundle: {reason}; nothing was changed.")


class DownloadsOffError(SpeakerRequestError):
    """The operator does not let reference audio out (403)."""

    http_status = HTTPStatus.FORBIDDEN
    text = "This server does not give reference audio back (SPEAKER_AUDIO_DOWNLOAD=0)."


class RequestTooLargeError(SpeakerRequestError):
    """The body of a request has more bytes than the route takes (413)."""

    http_status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE

    def __init__(self, max_bytes: int):
        super().__init__(
            f"The request body is larger than {max_bytes / 1024**2:.4g} MiB, which is "
            "the most that this route takes; nothing was changed. Send less; a clip "
            "can be cut, or compressed (FLAC, MP3)."
        )


class ServerFaultError(TTSCacheError):
    """The request was fine; this server, its disk or its worker failed (5xx)."""


class NoTenantError(ServerFaultError):
    """It is not known whose request is worked on, so no voice is looked up for it."""

    text = "It is not known which tenant this request is of."


class ServerBusyError(ServerFaultError):
    """A queue or a number of things done at once is at its bound (503)."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, what: str, retry_after_seconds: int):
        super().__init__(
            f"The server is busy: {what}. Try again in {retry_after_seconds} s."
        )
        self.retry_after_seconds = retry_after_seconds


class DeletionPendingError(ServerFaultError):
    """A voice is deleted, but not yet everything of it is gone (503).

    Attributes:
        files_removed: Whether nothing of it is left on disk.
        waiting_for: API servers that have not confirmed that they and their workers
            have deleted it.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE
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
        self.files_removed = files_removed
        self.waiting_for = waiting_for


class StorageError(ServerFaultError):
    """A tier, the source store or the registry failed."""


class StorageFullError(StorageError):
    """There is no space left where speakers are stored."""

    http_status = HTTPStatus.INSUFFICIENT_STORAGE
    text = (
        "There is no space left where voices are stored or received; nothing was "
        "changed. Free some space, or point SPEAKER_SAMPLES_DIR (received files: "
        "TMPDIR) to another disk."
    )


class StorageBusyError(StorageError):
    """Another process has held the catalogue's write lock for too long (503)."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, retry_after_seconds: int):
        super().__init__(
            "Another process is writing to the directory where voices are stored and "
            "has not finished in time; nothing was changed. Try again in "
            f"{retry_after_seconds} s. If it stays like this, look for a process that "
            "hangs, or is stopped, with a file of SPEAKER_SAMPLES_DIR open."
        )
        self.retry_after_seconds = retry_after_seconds


class StorageUnavailableError(StorageError):
    """The database of the catalogue cannot be reached, or does not answer (503).

    Args:
        where: What cannot be reached.
        detail: What happened, for the operator: it may name hosts and users.
        was_cut_off: Whether a connection was refused or lost: nobody knows what became
            of a transaction on it. Else it was full, or busy with others.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(
        self,
        where: str,
        detail: str,
        retry_after_seconds: int,
        *,
        was_cut_off: bool = True,
    ):
        super().__init__(
            "The voice catalogue is down: its PostgreSQL server does not answer as it "
            "should, and this server's log says why. Try again in "
            f"{retry_after_seconds} s."
        )
        self.detail = detail
        self.retry_after_seconds = retry_after_seconds
        self.was_cut_off = was_cut_off
        self._log_text = f"The voice catalogue {where} is down: {detail}."


class ObjectStoreError(StorageError):
    """The object store does not answer, or not as it should (503).

    Args:
        where: What cannot be reached.
        detail: What happened, for the operator: it may name hosts and objects.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    def __init__(self, where: str, detail: str, retry_after_seconds: int = 5):
        super().__init__(
            "The object store where voices are kept does not answer as it should, and "
            "this server's log says why. What is on this machine speaks on. Try again "
            f"in {retry_after_seconds} s."
        )
        self.retry_after_seconds = retry_after_seconds
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


class GoneError(EncodeError):
    """What a request was to speak with went while it was prepared: resolve it again."""


class AudioGoneError(GoneError):
    """The reference audio is not stored (any more): whoever has it may store it."""

    def __init__(self, audio_sha256: str):
        super().__init__("The reference audio is not stored (any more).")
        self.audio_sha256 = audio_sha256


class SpeakerReplacedError(GoneError):
    """Another clip was registered under the voice's name meanwhile (503).

    Attributes:
        retry_after_seconds: When it is worth trying again.
    """

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    retry_after_seconds = 2

    def __init__(self, name: str):
        super().__init__(
            f"Voice {name!r} is being replaced: each time that its encodings were "
            "there for this request, it had another clip. Try again in "
            f"{self.retry_after_seconds} s, when that is over."
        )
        self.name = name

    @property
    def log_text(self) -> str:
        """The message without the name."""
        return "A voice was replaced each time that a request had its encodings."


class EncodersChangedError(GoneError):
    """The workers have other encoders than this process knew of."""

    def __init__(self) -> None:
        super().__init__("The model was loaded anew, with other encoders. Try again.")


class EncodeTimeoutError(ServerFaultError):
    """An encoding did not arrive in time; it may still be under way."""

    http_status = HTTPStatus.SERVICE_UNAVAILABLE

    # By then it may be there; what is asked for too early waits for it once more.
    retry_after_seconds = 10


class WorkerRPCError(ServerFaultError):
    """A worker answered an RPC with an error, or with nothing we understand."""


class CheckpointError(TTSCacheError):
    """A model directory lacks what our encoders need; the operator can fix it."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"{path}: {reason}")


class RemoteError(TTSCacheError):
    """A server that we are a client of did not do what it was asked for."""


class ServerUnreachableError(RemoteError):
    """Nobody answers at the URL, or the connection broke."""

    def __init__(
        self,
        url: str,
        reason: str,
        hint: str = "Is the server running? Name another one with --url or "
        "SPEAKER_URL.",
    ):
        super().__init__(f"{url} does not answer: {reason.rstrip('.')}. {hint}")


class ServerAnswerError(RemoteError):
    """The server refused the request, or failed: with which HTTP ``status``."""

    def __init__(
        self, status: int, reason: str, retry_after_seconds: float | None = None
    ):
        super().__init__(f"{reason.rstrip('.')} (HTTP {status})")
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class NotThereError(ServerAnswerError):
    """The server has the route, and no voice or recording that is called so (404)."""


class RouteMissingError(ServerAnswerError):
    """The server runs without this plugin, or with a version that cannot do it."""

    def __init__(self, status: int, method: str, path: str):
        super().__init__(
            status,
            f"The server knows no {method} {path}. Is vllm-tts-cache loaded there, in "
            "this version? `vllm-tts-cache doctor` looks",
        )
