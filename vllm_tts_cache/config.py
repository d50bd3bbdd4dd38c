"""Settings: one frozen object, read once, passed down.

The settings of stock vLLM-Omni keep their names; ours share the prefix
``SPEAKER_CACHE_``, and an unknown variable with that prefix is an error, because
a misspelt budget that is silently ignored is found only when memory runs out.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_tts_cache.errors import ConfigError

WarmKV = Literal["idle", "off"]
RegistrationPolicy = Literal["overwrite", "immutable"]
Quality = Literal["poor", "fair", "good"]
ConsentPolicy = Literal["text", "recording"]
Similarity = Literal["off", "tell", "refuse"]
IPNetwork = IPv4Network | IPv6Network

OUTPUT_RATES_HZ = (8_000, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_PREFIX = "SPEAKER_CACHE_"
_MIN_SECRET_CHARS = 16
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _boolean(text: str) -> bool:
    if (lowered := text.strip().lower()) in _TRUE + _FALSE:
        return lowered in _TRUE
    raise ValueError(f"expected one of {', '.join(_TRUE + _FALSE)}")


def expanded(path: Path) -> Path:
    """Replace a leading ``~`` by the home directory.

    Raises: ConfigError: The user has no home directory (a container's numeric user).
    """
    try:
        return _path(str(path))
    except ValueError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as exc:
        raise ValueError(
            "the home directory is not known: write the path without ~"
        ) from exc


# Not `Path.expanduser`, which raises here if the user has no home: `load_settings`
# raises, and only if samples_dir is not set.
_DEFAULT_SAMPLES_DIR = Path(os.path.expanduser("~/.cache/vllm-omni/speakers"))  # noqa: PTH111


def _secret(text: str) -> str:
    if len(text) < _MIN_SECRET_CHARS:
        raise ValueError(f"expected at least {_MIN_SECRET_CHARS} characters")
    return text


def _catalogue_url(text: str) -> str:
    if not text.startswith(("postgresql://", "postgres://")):
        raise ValueError(
            "expected postgresql://user:password@host:5432/database; unset it for a "
            "file in SPEAKER_SAMPLES_DIR"
        )
    return text


def _store_url(text: str) -> str:
    if not text.startswith(("s3://", "gs://", "az://", "file:///")):
        raise ValueError(
            "expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or "
            "file:///directory; unset it for files in SPEAKER_SAMPLES_DIR"
        )
    return text


def _networks(text: str) -> tuple[IPNetwork, ...]:
    return tuple(ip_network(each.strip()) for each in text.split(","))


# Error messages do not show the values that these parsers take.
_SECRET_PARSERS = (_secret, _catalogue_url)


def _one_of(choices: Any) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if (chosen := text.strip().lower()) not in get_args(choices):
            raise ValueError(f"expected one of {', '.join(get_args(choices))}")
        return chosen

    return parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator can set.

    Attributes:
        enabled: False leaves stock behaviour; only the CPU platform stays.
        samples_dir: The directory of the catalogue, reference audio and encodings.
        catalogue_url: The PostgreSQL database in which the catalogue is, as libpq
            takes it; empty for an SQLite file in ``samples_dir``.
        store_url: The object store in which audio and encodings are; ``samples_dir``
            has copies of them then. Empty for files in ``samples_dir``. It needs a
            ``catalogue_url``.
        catalogue_grace_seconds: With a ``catalogue_url``: how long a server that
            cannot reach the catalogue goes on speaking the voices that it knows. A
            deletion waits so long for a server that was killed.
        max_uploaded: Registered speakers at most; 0 means no limit.
        registration_policy: ``overwrite`` replaces a registered name,
            ``immutable`` refuses it.
        consent: What a registration needs as ``consent``: any ``text``, or the id of a
            consent ``recording``.
        min_quality: The worst verdict with which a clip is still registered.
        similarity: Whether a registration is told, or refused, if its clip sounds like
            another voice, or unlike its consent recording.
        audio_download: Whether the reference audio of a voice can be downloaded.
        bundle_key: Signs exported voices; a server that has the same takes their ids,
            dates and encodings as they are. Empty for a key of ``samples_dir``'s own.
        web: Whether the page at ``/voices`` is served.
        stream: Whether speech is streamed, as OpenAI's, where a request does not say.
        default_voice: The voice that speaks where a request names none, or ``default``;
            with tenants, each has its own in the tenants' file.
        pcm_sample_rate: The rate of PCM if a request names none; 0 for the model's own.
        webhook_url: Told when a voice is ready, failed or was deleted; empty for none.
        webhook_secret: Signs the webhook's messages, as standardwebhooks.com says.
        webhook_networks: Private networks in which the webhook's address may be.
        tenants_file: The tenants with their API keys; without it there is one tenant.
        memory_max_bytes: Encodings a worker keeps in memory, inline ones included.
        memory_max_entries: The number of these encodings.
        decoder_max_bytes: States that a codec decoder keeps of voices, so that it does
            not decode their references for each request; 0 keeps no state.
        warm_kv: ``idle``: while no request runs, the server prepares new voices, and
            after a restart those that were used last. It fills the KV prefix (Fish
            Speech, Higgs Audio v3) or the decoder's state (Qwen3-TTS), so that the
            first request finds it. ``off``: the first request does this work.
        disk_max_bytes: Encodings kept on disk, inline ones included.
        inline_share: Part of the budgets of encodings that inline references may use.
        audio_max_bytes: Registered reference audio kept on disk; a voice that exceeds
            it is refused.
        inline_audio_max_bytes: Inline reference audio kept on disk.
        copies_max_bytes: Copies of an object store's files kept on disk.
        max_waiting_inline: Inline references that may wait for a worker's encoder at
            once; more are refused with 503.
        max_fetches: References fetched from URLs at once; more are refused with 503.
        fetch_networks: Networks (``10.2.0.0/16,fd12::/32``) from which references may
            be fetched as from public addresses.
        encode_timeout_seconds: How long an encode may take, and a request wait without
            any progress of the workers; in all it waits five times as long.
        drain_seconds: How long a server that gets SIGTERM goes on with its requests; it
            takes no new ones. With several API processes it is two seconds at most.
        cpu_platform: Register a CPU platform with vLLM-Omni where vLLM is built for
            CPUs and torch sees no accelerator.
    """

    enabled: bool = True
    samples_dir: Path = _DEFAULT_SAMPLES_DIR
    catalogue_url: str = field(default="", repr=False)
    store_url: str = ""
    catalogue_grace_seconds: float = 60.0
    max_uploaded: int = 1000
    registration_policy: RegistrationPolicy = "overwrite"
    consent: ConsentPolicy = "text"
    min_quality: Quality = "poor"
    similarity: Similarity = "off"
    audio_download: bool = True
    bundle_key: str = field(default="", repr=False)
    web: bool = True
    stream: bool = False
    default_voice: str = ""
    pcm_sample_rate: int = 0
    webhook_url: str = field(default="", repr=False)
    webhook_secret: str = field(default="", repr=False)
    webhook_networks: tuple[IPNetwork, ...] = ()
    tenants_file: Path | None = None
    memory_max_bytes: int = 512 * 1024**2
    memory_max_entries: int = 1024
    decoder_max_bytes: int = 512 * 1024**2
    warm_kv: WarmKV = "idle"
    disk_max_bytes: int = 20 * 1024**3
    inline_share: float = 0.125
    audio_max_bytes: int = 20 * 1024**3
    inline_audio_max_bytes: int = 1024**3
    copies_max_bytes: int = 20 * 1024**3
    max_waiting_inline: int = 64
    max_fetches: int = 16
    fetch_networks: tuple[IPNetwork, ...] = ()
    encode_timeout_seconds: float = 120.0
    drain_seconds: float = 20.0
    cpu_platform: bool = True

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.catalogue_grace_seconds < MIN_GRACE_SECONDS:
            raise ValueError(f"catalogue_grace_seconds is below {MIN_GRACE_SECONDS:g}")
        for name in ("max_uploaded", "decoder_max_bytes"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative: {value}")
        if self.pcm_sample_rate not in (0, *OUTPUT_RATES_HZ):
            raise ValueError(f"expected one of {', '.join(map(str, OUTPUT_RATES_HZ))}")
        if self.default_voice.strip().lower() == "default":
            raise ValueError("name a voice; 'default' is what asks for it")
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds must be in [0, inf): {self.drain_seconds}")
        if not 0 <= self.inline_share < 1:
            raise ValueError(f"inline_share must be in [0, 1), got {self.inline_share}")


# A server renews its lease every second, and may be late.
MIN_GRACE_SECONDS = 12.0

_POSITIVE = (
    *("catalogue_grace_seconds", "encode_timeout_seconds", "memory_max_entries"),
    *("memory_max_bytes", "disk_max_bytes", "audio_max_bytes", "copies_max_bytes"),
    *("inline_audio_max_bytes", "max_waiting_inline", "max_fetches"),
)

# variable -> (field, parser); later variables win, so ours override stock's.
VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "VLLM_OMNI_SPEAKER_REGISTRATION_POLICY": (
        "registration_policy",
        _one_of(RegistrationPolicy),
    ),
    "SPEAKER_SAMPLES_DIR": ("samples_dir", _path),
    "SPEAKER_CATALOGUE_URL": ("catalogue_url", _catalogue_url),
    "SPEAKER_STORE_URL": ("store_url", _store_url),
    "SPEAKER_CATALOGUE_GRACE_SECONDS": ("catalogue_grace_seconds", float),
    "SPEAKER_MAX_UPLOADED": ("max_uploaded", int),
    "SPEAKER_CONSENT": ("consent", _one_of(ConsentPolicy)),
    "SPEAKER_MIN_QUALITY": ("min_quality", _one_of(Quality)),
    "SPEAKER_SIMILARITY": ("similarity", _one_of(Similarity)),
    "SPEAKER_AUDIO_DOWNLOAD": ("audio_download", _boolean),
    "SPEAKER_BUNDLE_KEY": ("bundle_key", _secret),
    "SPEAKER_WEB": ("web", _boolean),
    "SPEAKER_STREAM": ("stream", _boolean),
    "SPEAKER_DEFAULT_VOICE": ("default_voice", str),
    "SPEAKER_PCM_SAMPLE_RATE": ("pcm_sample_rate", int),
    "SPEAKER_WEBHOOK_URL": ("webhook_url", str),
    "SPEAKER_WEBHOOK_SECRET": ("webhook_secret", _secret),
    "SPEAKER_WEBHOOK_NETWORKS": ("webhook_networks", _networks),
    "SPEAKER_TENANTS_FILE": ("tenants_file", _path),
    "SPEAKER_CACHE_ENABLED": ("enabled", _boolean),
    "SPEAKER_CACHE_MAX_BYTES": ("memory_max_bytes", int),
    "SPEAKER_CACHE_MAX_ENTRIES": ("memory_max_entries", int),
    "SPEAKER_CACHE_DECODER_MAX_BYTES": ("decoder_max_bytes", int),
    "SPEAKER_CACHE_WARM_KV": ("warm_kv", _one_of(WarmKV)),
    "SPEAKER_CACHE_DISK_MAX_BYTES": ("disk_max_bytes", int),
    "SPEAKER_CACHE_INLINE_SHARE": ("inline_share", float),
    "SPEAKER_CACHE_AUDIO_MAX_BYTES": ("audio_max_bytes", int),
    "SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES": ("inline_audio_max_bytes", int),
    "SPEAKER_CACHE_COPIES_MAX_BYTES": ("copies_max_bytes", int),
    "SPEAKER_CACHE_MAX_WAITING_INLINE": ("max_waiting_inline", int),
    "SPEAKER_CACHE_MAX_FETCHES": ("max_fetches", int),
    "SPEAKER_CACHE_FETCH_NETWORKS": ("fetch_networks", _networks),
    "SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS": ("encode_timeout_seconds", float),
    "SPEAKER_DRAIN_SECONDS": ("drain_seconds", float),
    "SPEAKER_CACHE_CPU_PLATFORM": ("cpu_platform", _boolean),
}


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Build the settings from the environment.

    Raises: ConfigError: A ``SPEAKER_CACHE_`` variable is unknown, or a value is wrong;
        the message names the variable.
    """
    ours = (variable for variable in environ if variable.startswith(_PREFIX))
    if unknown := sorted(set(ours) - set(VARIABLES)):
        known = ", ".join(v for v in VARIABLES if v.startswith(_PREFIX))
        raise ConfigError(f"Unknown setting {', '.join(unknown)}; known: {known}")
    given: dict[str, Any] = {}
    for variable, (name, parse) in VARIABLES.items():
        if not (text := environ.get(variable, "").strip()):
            continue
        try:
            if parse is not _path:  # the name of a file may have any bytes
                text.encode()
            given[name] = parse(text)
            Settings(**{name: given[name]})
        except ValueError as exc:
            shown = "(not shown)" if parse in _SECRET_PARSERS else repr(text)
            raise ConfigError(f"{variable}={shown}: {exc}") from exc
    if given.get("store_url") and not given.get("catalogue_url"):
        raise ConfigError(
            "SPEAKER_STORE_URL is set, and SPEAKER_CATALOGUE_URL is not: the catalogue "
            "of a bucket is on PostgreSQL. Set SPEAKER_CATALOGUE_URL to its database"
        )
    settings = Settings(**given)
    has_default = _DEFAULT_SAMPLES_DIR.is_absolute()
    if settings.enabled and "samples_dir" not in given and not has_default:
        raise ConfigError(
            "SPEAKER_SAMPLES_DIR is not set, and this user has no home directory to "
            "keep voices in: set it to a directory"
        )
    return settings


def allows_plain_http() -> bool:
    """Whether S3's own variables allow requests to an object store without encryption.

    An ``http://`` endpoint does, and so does ``AWS_ALLOW_HTTP``.
    """
    names = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"
    if any(os.environ.get(name, "").startswith("http://") for name in names):
        return True
    return os.environ.get("AWS_ALLOW_HTTP", "").strip().lower() in _TRUE


def metrics_directory() -> Path | None:
    """Return where several API processes share their metrics; None without sharing.

    The host or the operator sets this variable of prometheus_client's.
    """
    path = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return Path(path) if path else None
