"""Every exception this package raises on purpose.

They are classed by who can fix them; the HTTP layer maps classes to statuses
(``entrypoints/routing.py``), so a new error belongs under the branch that
says who that is.
"""


class TTSCacheError(Exception):
    """Base of all errors raised by vllm-tts-cache."""


class ConfigError(TTSCacheError):
    """A setting is wrong; the operator can fix it. The message names the variable."""


class SpeakerRequestError(TTSCacheError):
    """The caller can fix it (4xx)."""


class InvalidAudioError(SpeakerRequestError):
    """The reference audio cannot be used."""

    def __init__(self, reason: str):
        super().__init__(f"The reference audio cannot be used: {reason}")
        self.reason = reason


class InvalidSpeakerError(SpeakerRequestError):
    """A field of a registration or of a speech request is wrong."""

    def __init__(self, field: str, reason: str):
        super().__init__(f"Invalid {field}: {reason}")
        self.field = field
        self.reason = reason


class SpeakerNotFoundError(SpeakerRequestError):
    """No speaker is registered under this name."""

    def __init__(self, name: str):
        super().__init__(
            f"Voice {name!r} is not registered. Register it with "
            "POST /v1/audio/voices (name, consent, audio_sample), or see "
            "GET /v1/audio/voices for the registered ones."
        )
        self.name = name


class SpeakerExistsError(SpeakerRequestError):
    """The name is taken and the registration policy is ``immutable``."""

    def __init__(self, name: str):
        super().__init__(
            f"Voice {name!r} is already registered and the registration policy is "
            "'immutable'. Delete it first, or choose another name."
        )
        self.name = name


class SpeakerLimitError(SpeakerRequestError):
    """The registry holds as many speakers as it may."""

    def __init__(self, limit: int):
        super().__init__(
            f"{limit} voices are registered, which is the limit. Delete one, or raise "
            "SPEAKER_MAX_UPLOADED (0 = no limit)."
        )
        self.limit = limit


class AudioBudgetError(SpeakerRequestError):
    """The reference audio of all voices may not take more bytes on disk (409).

    Attributes:
        max_bytes: What it may take.
    """

    def __init__(self, max_bytes: int):
        super().__init__(
            f"The reference audio of the registered voices may take {max_bytes} "
            "bytes, and this clip no longer fits; nothing was changed. Delete a voice, "
            "send a shorter clip, or raise SPEAKER_CACHE_AUDIO_MAX_BYTES."
        )
        self.max_bytes = max_bytes


class RequestTooLargeError(SpeakerRequestError):
    """The body of a request has more bytes than the route takes (413).

    Attributes:
        max_bytes: What the route takes.
    """

    def __init__(self, max_bytes: int):
        super().__init__(
            f"The request body is larger than {max_bytes / 1024**2:g} MiB, which is "
            "the most that this route takes; nothing was changed. Send a shorter clip, "
            "or a compressed one (FLAC, MP3)."
        )
        self.max_bytes = max_bytes


class ServerFaultError(TTSCacheError):
    """The request was fine; this server, its disk or its worker failed (5xx)."""


class ServerBusyError(ServerFaultError):
    """A queue or a number of things done at once is at its bound (503).

    Attributes:
        what: What there is too much of, as the message begins.
        retry_after_seconds: When it is worth trying again.
    """

    def __init__(self, what: str, retry_after_seconds: int):
        super().__init__(
            f"The server is busy: {what}. Try again in {retry_after_seconds} s."
        )
        self.what = what
        self.retry_after_seconds = retry_after_seconds


class DeletionPendingError(ServerFaultError):
    """A voice is deleted, but not yet everything of it is gone (503).

    Attributes:
        name: Of the voice, as the request spells it.
        files_removed: Whether nothing of it is left on disk.
        waiting_for: API servers that have not confirmed that they and their workers
            have dropped it.
        retry_after_seconds: When it is worth asking again.
    """

    def __init__(
        self,
        name: str,
        *,
        files_removed: bool,
        waiting_for: int,
        retry_after_seconds: int = 1,
    ):
        files = "gone" if files_removed else "not yet removed"
        super().__init__(
            f"Voice {name!r} is deleted and answers no request any more, but not all "
            f"of it is gone: its files are {files}, API servers that have not "
            f"confirmed: {waiting_for}. It goes on by itself. Repeat the DELETE in "
            f"{retry_after_seconds} s to learn how far it is."
        )
        self.name = name
        self.files_removed = files_removed
        self.waiting_for = waiting_for
        self.retry_after_seconds = retry_after_seconds


class StorageError(ServerFaultError):
    """A tier, the source store or the registry failed."""


class StorageFullError(StorageError):
    """There is no space left where speakers are stored."""

    def __init__(self, path: str):
        super().__init__(
            "There is no space left where voices are stored or received; nothing was "
            "changed. Free some space, or point SPEAKER_SAMPLES_DIR (received files: "
            "TMPDIR) to another disk."
        )
        self.path = path


class StorageBusyError(StorageError):
    """Another process has held the catalogue's write lock for too long (503).

    Attributes:
        retry_after_seconds: When it is worth trying again.
    """

    def __init__(self, retry_after_seconds: int):
        super().__init__(
            "Another process is writing to the directory where voices are stored and "
            "has not finished in time; nothing was changed. Try again in "
            f"{retry_after_seconds} s. If it stays like this, look for a process that "
            "hangs, or is stopped, with a file of SPEAKER_SAMPLES_DIR open."
        )
        self.retry_after_seconds = retry_after_seconds


class EncodingCorruptError(StorageError):
    """Stored bytes do not match their key."""

    def __init__(self, key: str, reason: str):
        super().__init__(f"Encoding {key} is corrupt: {reason}")
        self.key = key
        self.reason = reason


class SourceCorruptError(StorageError):
    """A stored source (audio or embedding) does not match its content address."""

    def __init__(self, source_sha256: str, reason: str):
        super().__init__(f"Stored source {source_sha256} is corrupt: {reason}")
        self.source_sha256 = source_sha256
        self.reason = reason


class EncodeError(ServerFaultError):
    """A reference encoder failed on a clip; a later call tries again."""


class EncodeTimeoutError(ServerFaultError):
    """An encoding did not arrive in time; it may still be under way."""


class WorkerRPCError(ServerFaultError):
    """A worker answered an RPC with an error, or with nothing we understand."""


class CheckpointError(TTSCacheError):
    """A model directory lacks what our encoders need; the operator can fix it."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
