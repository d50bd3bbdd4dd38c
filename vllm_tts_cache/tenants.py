"""Tenants: which API keys belong to which tenant, and its limits; from one JSON file.

The file may change while the server runs: `TenantKeys` checks every second.
"""

import hashlib
import re
import stat
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_tts_cache.errors import ConfigError, NoTenantError, UnauthorizedError
from vllm_tts_cache.logs import logger

VARIABLE = "SPEAKER_TENANTS_FILE"
MAX_BYTES = 4 * 1024 * 1024
# The only tenant without a file; it keeps what was registered before there was one.
DEFAULT_TENANT = "default"

_HASHED = "sha256:"
_HEX = re.compile("[0-9a-f]{64}")
_BYTE = re.compile(r" \(byte (\d+)\)")

_Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
# Printable ASCII, as it goes into a header.
_Key = Annotated[str, Meta(pattern="^[!-~]{16,256}$")]
_Keys = Annotated[list[_Key], Meta(max_length=100)]
_Positive = Annotated[int, Meta(ge=1, le=2**53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one tenant may have; None means that only the limit of all tenants applies.

    Attributes:
        max_voices: Registered voices, and consent recordings.
        max_audio_bytes: Registered reference audio, each clip counted once.
        max_inline: Inline references that may be fetched or encoded at once.
    """

    max_voices: int | None = None
    max_audio_bytes: int | None = None
    max_inline: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The owner of the voices that a request uses.

    Attributes:
        default_voice: The voice of requests that name none; empty for none.
    """

    name: str = DEFAULT_TENANT
    limits: Limits = NO_LIMITS
    default_voice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request: a tenant, or None for an administrator, who has no voices."""

    tenant: Tenant | None


ALONE = Tenant()  # without a tenants file


class _TenantEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: _Name
    keys: _Keys
    max_voices: _Positive | None = None
    max_audio_bytes: _Positive | None = None
    max_inline: _Positive | None = None
    default_voice: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tenants: Annotated[list[_TenantEntry], Meta(max_length=10_000)]
    admin_keys: _Keys = []


@dataclass(frozen=True, slots=True)
class Keyring:
    """All API keys with their callers.

    Attributes:
        callers: By the SHA-256 of their keys: a nearly right key has an entirely
            different digest, so the time of a lookup reveals nothing about keys.
        tenants: The tenants that have a key, by name.
    """

    callers: Mapping[bytes, Caller]
    tenants: Mapping[str, Tenant]

    def caller(self, key: str) -> Caller | None:
        """Return the caller that has this key; None if no caller has it."""
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
        return self.callers.get(digest)


def parse(data: bytes, where: str) -> Keyring:
    """Parse the content of the file ``where``, which ``docs/tenants.md`` describes.

    Raises:
        ConfigError: It is invalid; the message has the line or the field, and no key.
    """
    file = _decoded(data, where)
    callers: dict[bytes, Caller] = {}

    def add(keys: list[str], caller: Caller, place: str) -> None:
        for number, key in enumerate(keys):
            reason = "the key is there twice"
            if (digest := _digest(key)) is None:
                reason = "sha256: is followed by 64 hex digits"
            if digest is None or digest in callers:
                raise _invalid(where, f"{reason} - at `{place}[{number}]`")
            callers[digest] = caller

    tenants: dict[str, Tenant] = {}
    for index, entry in enumerate(file.tenants):
        place = f"$.tenants[{index}]"
        if entry.name in tenants:
            raise _invalid(where, f"{entry.name!r} is there twice - at `{place}.name`")
        limits = msgspec.convert(entry, Limits, from_attributes=True)
        tenants[entry.name] = Tenant(
            name=entry.name, limits=limits, default_voice=entry.default_voice
        )
        add(entry.keys, Caller(tenant=tenants[entry.name]), f"{place}.keys")
    add(file.admin_keys, Caller(tenant=None), "$.admin_keys")
    have_keys = {entry.name for entry in file.tenants if entry.keys}
    return Keyring(callers, {name: tenants[name] for name in have_keys})


def _decoded(data: bytes, where: str) -> _File:
    if len(data) > MAX_BYTES:
        raise _invalid(where, f"it has more than {MAX_BYTES // 1024**2} MiB")
    try:
        return msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as exc:
        raise _invalid(where, str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        byte = _BYTE.search(str(exc))
        end = len(data) if byte is None else int(byte[1])  # truncated
        line = data.count(b"\n", 0, end) + 1
        raise _invalid(where, f"line {line}: {_BYTE.sub('', str(exc))}") from exc


def _invalid(where: str, reason: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}={where}: {reason}")


def _digest(key: str) -> bytes | None:
    """The SHA-256 of a plain key or of one given as ``sha256:HEX``; None if invalid."""
    if not key.lower().startswith(_HASHED):
        return hashlib.sha256(key.encode()).digest()
    digits = key[len(_HASHED) :]
    return bytes.fromhex(digits) if _HEX.fullmatch(digits) else None


LOOK_SECONDS = 1.0


class TenantKeys:
    """The keys of ``SPEAKER_TENANTS_FILE``; safe in any thread.

    Without a file, ``is_on`` is false, and no caller is asked for a key.

    Raises: ConfigError: The file cannot be read, or is invalid.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self.is_on = path is not None
        self._keyring = Keyring({}, {})
        self._version: tuple[int, ...] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            self._version = _version_of(path)
            self._keyring = _read(path)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """The tenants that have a key, by name."""
        return self._keyring.tenants

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller of an Authorization header, read as by ``--api-key``.

        Raises: UnauthorizedError: The header holds no key of the file.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or (found := self._keyring.caller(key)) is None:
            raise UnauthorizedError
        return found

    def start(self) -> None:
        """Start a thread that reloads the file when it changes."""
        if self.is_on and self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="tts-cache-tenants", daemon=True
            )
            self._thread.start()

    def shutdown(self) -> None:
        """Stop the thread that reloads the file."""
        self._ended.set()

    def reload(self) -> None:
        """Read the file if it has changed; keep the keys if the new file is invalid."""
        path = self._path
        if path is None or (version := _version_of(path)) == self._version:
            return
        self._version = version  # so an invalid file is logged once, until it changes
        try:
            # One assignment: a thread sees the old keys or the new ones, never a mix.
            self._keyring = _read(path)
        except ConfigError as exc:
            if isinstance(exc.__cause__, OSError):  # it may revoke a key: read it again
                self._version = None
            logger.error("%s. The keys stay as they were.", exc)
        else:
            logger.info("Read the keys of %d tenants anew.", len(self.tenants))

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.reload()


def _read(path: Path) -> Keyring:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise ConfigError(f"{VARIABLE}={path}: {reason}") from exc
    keyring = parse(data, str(path))
    if is_open_to_others(path):
        message = "%s=%s can be read by everybody on this machine: chmod 600 it."
        logger.warning(message, VARIABLE, path)
    return keyring


def _version_of(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def is_open_to_others(path: Path) -> bool:
    """Whether users outside of the owner's group may read the file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


# A context variable, because the host's serving class calls through several layers
# between the route and the lookup of a voice, and takes no more arguments.
_speaking: ContextVar[Tenant | None] = ContextVar("speaking_tenant", default=None)


@contextmanager
def speaking_for(tenant: Tenant) -> Generator[None, None, None]:
    """Have the host, inside the block, look voices up in this tenant."""
    token = _speaking.set(tenant)
    try:
        yield
    finally:
        _speaking.reset(token)


def is_speaking() -> bool:
    """Whether `speaking_for` is open here, as it is for our routes, not the host's."""
    return _speaking.get() is not None


def speaking_tenant(keys: TenantKeys) -> Tenant:
    """Return the tenant in which the host has to look voices up now.

    Raises: NoTenantError: There is a tenants file, and no `speaking_for` block is open.
    """
    if not keys.is_on:
        return ALONE
    if (tenant := _speaking.get()) is None:
        raise NoTenantError
    return tenant
