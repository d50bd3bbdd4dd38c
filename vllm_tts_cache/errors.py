"""Every exception this package raises on purpose.

They are classed by who can fix them; the HTTP layer maps classes to statuses
(``entrypoints/http_errors.py``), so a new error belongs under the branch that
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


class ServerFaultError(TTSCacheError):
    """The request was fine; this server, its disk or its worker failed (5xx)."""


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
