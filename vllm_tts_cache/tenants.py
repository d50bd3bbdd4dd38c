"""Tenants: whose keys are whose, and how much each may keep; from one JSON file.

The file may change while the server is at work: `TenantKeys` looks for that.
"""

import hashlib
import logging
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

VARIABLE = "SPEAKER_TENANTS_FILE"
MAX_BYTES = 4 * 1024 * 1024
# What is there without a file, and what was registered before there was one.
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
    """What one tenant may have; None leaves it to the limit of all together.

    Attributes:
        max_voices: Registered voices, and consent recordings.
        max_audio_bytes: Registered reference audio, each clip counted once.
        max_inline: Inline references that are fetched or encoded at once.
    """

    max_voices: int | None = None
    max_audio_bytes: int | None = None
    max_inline: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose voices a request is about."""

    name: str = DEFAULT_TENANT
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request: a tenant, or an administrator, who has no voices.

    Attributes:
        tenant: None for an administrator.
    """

    tenant: Tenant | None


ALONE = Tenant()  # where there are no others


class _TenantEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: _Name
    keys: _Keys
    max_voices: _Positive | None = None
    max_audio_bytes: _Positive | None = None
    max_inline: _Positive | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tenants: Annotated[list[_TenantEntry], Meta(max_length=10_000)]
    admin_keys: _Keys = []


@dataclass(frozen=True, slots=True)
class Keyring:
    """All keys, and whose they are.

    Attributes:
        callers: By the SHA-256 of their keys: a key that is nearly right has a digest
            of which nothing is right, so the time of a look-up says nothing of keys.
        tenants: Those that have a key, by their names.
    """

    callers: Mapping[bytes, Caller]
    tenants: Mapping[str, Tenant]

    def caller(self, key: str) -> Caller | None:
        """Return who has this key."""
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
        return self.callers.get(digest)


def parse(data: bytes, where: str) -> Keyring:
    """Return the keys of a file's content.

    Args:
        data: JSON; see ``docs/tenants.md``.
        where: The file, for messages.

    Raises:
        ConfigError: It is wrong; the message has the line or the field, and no key.
    """
    file = _decoded(data, where)
    callers: dict[bytes, Caller] = {}

    def add(keys: list[str], caller: Caller, place: str) -> None:
        for number, key in enumerate(keys):
            if (digest := _digest(key)) is None:
                reason = "sha256: is followed by 64 hex digits"
                raise _wrong(where, f"{reason} - at `{place}[{number}]`")
            if digest in callers:
                raise _wrong(where, f"the key is there twice - at `{place}[{number}]`")
            callers[digest] = caller

    tenants: dict[str, Tenant] = {}
    for index, entry in enumerate(file.tenants):
        place = f"$.tenants[{index}]"
        if entry.name in tenants:
            raise _wrong(where, f"{entry.name!r} is there twice - at `{place}.name`")
        limits = msgspec.convert(entry, Limits, from_attributes=True)
        tenants[entry.name] = Tenant(name=entry.name, limits=limits)
        add(entry.keys, Caller(tenant=tenants[entry.name]), f"{place}.keys")
    add(file.admin_keys, Caller(tenant=None), "$.admin_keys")
    have_keys = {entry.name for entry in file.tenants if entry.keys}
    return Keyring(callers, {name: tenants[name] for name in have_keys})


def _decoded(data: bytes, where: str) -> _File:
    if len(data) > MAX_BYTES:
        raise _wrong(where, f"it has more than {MAX_BYTES // 1024**2} MiB")
    try:
        return msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as exc:
        raise _wrong(where, str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        byte = _BYTE.search(str(exc))
        end = len(data) if byte is None else int(byte[1])  # it was truncated
        line = data.count(b"\n", 0, end) + 1
        raise _wrong(where, f"line {line}: {_BYTE.sub('', str(exc))}") from exc


def _wrong(where: str, reason: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}={where}: {reason}")


def _digest(key: str) -> bytes | None:
    """The SHA-256 of a key that is given plainly, or as that; None if it is neither."""
    if not key.lower().startswith(_HASHED):
        return hashlib.sha256(key.encode()).digest()
    digits = key[len(_HASHED) :]
    return bytes.fromhex(digits) if _HEX.fullmatch(digits) else None


logger = logging.getLogger("vllm.vllm_tts_cache")

LOOK_SECONDS = 1.0

_NOBODY_ELSE = Caller(tenant=ALONE)


class TenantKeys:
    """The keys of ``SPEAKER_TENANTS_FILE``; any thread may ask.

    Args:
        path: None where there are no tenants: then everybody is the one that there is.

    Attributes:
        is_on: Whether there are tenants.

    Raises:
        ConfigError: The file cannot be read, or is wrong.
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
        """Those that have a key, by their names."""
        return self._keyring.tenants

    def caller(self, authorization: str | None) -> Caller:
        """Return who sends this header; as vLLM's ``--api-key`` reads it.

        Raises: UnauthorizedError.
        """
        if not self.is_on:
            return _NOBODY_ELSE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or (found := self._keyring.caller(key)) is None:
            raise UnauthorizedError
        return found

    def start(self) -> None:
        """Look now and then whether the file has changed, in a thread."""
        if self.is_on and self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="tts-cache-tenants", daemon=True
            )
            self._thread.start()

    def shutdown(self) -> None:
        """Look no longer."""
        self._ended.set()

    def reload(self) -> None:
        """Take in a file that has changed; one that is wrong changes nothing."""
        path = self._path
        if path is None or (version := _version_of(path)) == self._version:
            return
        self._version = version  # of a wrong one there is one line until it changes
        try:
            # Whole, and at once for whoever asks.
            self._keyring = _read(path)
        except ConfigError as exc:
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
        logger.warning(
            "%s=%s can be read by everybody on this machine: chmod 600 it.",
            VARIABLE,
            path,
        )
    return keyring


def _version_of(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def is_open_to_others(path: Path) -> bool:
    """Whether whoever is not of the owner's group may read the file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


# A context variable, because the host's serving class calls through several layers
# between the route and where a voice is looked up, and takes no more arguments.
_speaking: ContextVar[Tenant | None] = ContextVar("speaking_tenant", default=None)


@contextmanager
def speaking_for(tenant: Tenant) -> Generator[None, None, None]:
    """Look up the voices of this tenant for what the host does inside."""
    token = _speaking.set(tenant)
    try:
        yield
    finally:
        _speaking.reset(token)


def is_speaking() -> bool:
    """Whether a route of ours has the host speak here, and no other one of the host."""
    return _speaking.get() is not None


def speaking_tenant(keys: TenantKeys) -> Tenant:
    """Return whose voices the host is to speak with here.

    Raises: NoTenantError: Nobody said so, and there are several; none is guessed.
    """
    if not keys.is_on:
        return ALONE
    if (tenant := _speaking.get()) is None:
        raise NoTenantError
    return tenant
