"""Settings: one frozen object, read once, passed down.

The settings of stock vLLM-Omni keep their names; ours share the prefix
``SPEAKER_CACHE_``, and an unknown variable with that prefix is an error, because
a misspelt budget that is silently ignored is found only when memory runs out.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from vllm_tts_cache.errors import ConfigError

RegistrationPolicy = Literal["overwrite", "immutable"]

_PREFIX = "SPEAKER_CACHE_"
_DEFAULT_SAMPLES_DIR = Path("~/.cache/vllm-omni/speakers").expanduser()
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _boolean(text: str) -> bool:
    if (lowered := text.strip().lower()) in _TRUE + _FALSE:
        return lowered in _TRUE
    raise ValueError(f"expected one of {', '.join(_TRUE + _FALSE)}")


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _policy(text: str) -> RegistrationPolicy:
    policy = text.strip().lower()
    if policy not in get_args(RegistrationPolicy):
        raise ValueError(f"expected one of {', '.join(get_args(RegistrationPolicy))}")
    return cast(RegistrationPolicy, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator can set.

    Attributes:
        enabled: False leaves stock behaviour; only the CPU platform stays.
        samples_dir: Where the registry, sources and encodings live.
        max_uploaded: Registered speakers at most; 0 means no limit.
        registration_policy: ``overwrite`` replaces a registered name,
            ``immutable`` refuses it.
        memory_max_bytes: Encodings a worker keeps in memory, inline ones included.
        memory_max_entries: The same, counted in encodings.
        disk_max_bytes: Encodings kept on disk, inline ones included.
        inline_share: Part of each budget above that inline references may use.
        audio_max_bytes: Registered reference audio kept on disk; one more voice is
            refused.
        inline_audio_max_bytes: Inline reference audio kept on disk.
        max_waiting_inline: Inline references that may wait for a worker's encoder at
            once; one more is refused with 503.
        max_fetches: References fetched from URLs at once; one more is refused with
            503.
        encode_timeout_seconds: How long a request waits for a cold reference.
        cpu_platform: Register a CPU platform with vLLM-Omni where vLLM is built for
            CPUs and torch sees no accelerator.
    """

    enabled: bool = True
    samples_dir: Path = _DEFAULT_SAMPLES_DIR
    max_uploaded: int = 1000
    registration_policy: RegistrationPolicy = "overwrite"
    memory_max_bytes: int = 512 * 1024**2
    memory_max_entries: int = 1024
    disk_max_bytes: int = 20 * 1024**3
    inline_share: float = 0.125
    audio_max_bytes: int = 20 * 1024**3
    inline_audio_max_bytes: int = 1024**3
    max_waiting_inline: int = 64
    max_fetches: int = 16
    encode_timeout_seconds: float = 120.0
    cpu_platform: bool = True

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.max_uploaded < 0:
            raise ValueError(f"max_uploaded must not be negative: {self.max_uploaded}")
        if not 0 <= self.inline_share < 1:
            raise ValueError(f"inline_share must be in [0, 1), got {self.inline_share}")


_POSITIVE = (
    "memory_max_bytes",
    "memory_max_entries",
    "disk_max_bytes",
    "audio_max_bytes",
    "inline_audio_max_bytes",
    "max_waiting_inline",
    "max_fetches",
    "encode_timeout_seconds",
)

# variable -> (field, parser); later variables win, so ours override stock's.
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "VLLM_OMNI_SPEAKER_REGISTRATION_POLICY": ("registration_policy", _policy),
    "SPEAKER_SAMPLES_DIR": ("samples_dir", _path),
    "SPEAKER_MAX_UPLOADED": ("max_uploaded", int),
    "SPEAKER_CACHE_ENABLED": ("enabled", _boolean),
    "SPEAKER_CACHE_MAX_BYTES": ("memory_max_bytes", int),
    "SPEAKER_CACHE_MAX_ENTRIES": ("memory_max_entries", int),
    "SPEAKER_CACHE_DISK_MAX_BYTES": ("disk_max_bytes", int),
    "SPEAKER_CACHE_INLINE_SHARE": ("inline_share", float),
    "SPEAKER_CACHE_AUDIO_MAX_BYTES": ("audio_max_bytes", int),
    "SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES": ("inline_audio_max_bytes", int),
    "SPEAKER_CACHE_MAX_WAITING_INLINE": ("max_waiting_inline", int),
    "SPEAKER_CACHE_MAX_FETCHES": ("max_fetches", int),
    "SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS": ("encode_timeout_seconds", float),
    "SPEAKER_CACHE_CPU_PLATFORM": ("cpu_platform", _boolean),
}


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Build the settings from the environment.

    Raises:
        ConfigError: A ``SPEAKER_CACHE_`` variable is unknown, or a value is wrong;
            the message names the variable.
    """
    ours = (variable for variable in environ if variable.startswith(_PREFIX))
    if unknown := sorted(set(ours) - set(_VARIABLES)):
        known = ", ".join(v for v in _VARIABLES if v.startswith(_PREFIX))
        raise ConfigError(f"Unknown setting {', '.join(unknown)}; known: {known}")
    given: dict[str, Any] = {}
    for variable, (field, parse) in _VARIABLES.items():
        if not (text := environ.get(variable, "").strip()):
            continue
        try:
            given[field] = parse(text)
            Settings(**{field: given[field]})
        except ValueError as exc:
            raise ConfigError(f"{variable}={text!r}: {exc}") from exc
    return Settings(**given)
