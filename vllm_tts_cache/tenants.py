"""Tenants: whose keys are whose, and how much each may keep; from one JSON file.

The file may change while the server is at work: `TenantKeys` looks for that.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
import threading
from collections.abc import Generator, Iterator
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
# Of a digest, to find the few that are compared: nobody learns a key by these.
_BUCKET_BYTES = 2

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

    def tenant(self) -> Tenant:
        limits = Limits(
            max_voices=self.max_voices,
            max_audio_bytes=self.max_audio_bytes,
            max_inline=self.max_inline,
        )
        return Tenant(name=self.name, limits=limits)


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tenants: Annotated[list[_TenantEntry], Meta(max_length=10_000)]
    admin_keys: _Keys = []


class Keyring:
    """All keys by their digests, and the caller of each; never changed.

    Args:
        callers: By the SHA-256 of their keys.
    """

    def __init__(self, callers: dict[bytes, Caller]):
        self._buckets: dict[bytes, list[tuple[bytes, Caller]]] = {}
        for digest, caller in callers.items():
            bucket = self._buckets.setdefault(digest[:_BUCKET_BYTES], [])
            bucket.append((digest, caller))
        tenants = [each.tenant for each in callers.values() if each.tenant is not None]
        self.tenants = {tenant.name: tenant for tenant in tenants}

    def caller(self, key: str) -> Caller | None:
        """Return who has this key; takes as long for one that is nearly right.

        The digests are compared, of which a wrong key's has nothing in common with
        any other, and those to their end.
        """
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
        found: Caller | None = None
        for known, caller in self._buckets.get(digest[:_BUCKET_BYTES], ()):
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def parse(data: bytes, where: str) -> Keyring:
    """Return the keys of a file's content.

    Args:
        data: JSON; see ``docs/tenants.md``.
        where: The file, for messages.

    Raises:
        ConfigError: It is wrong; the message has the line or the field, and no key.
    """
    if len(data) > MAX_BYTES:
        raise _wrong(where, f"it has more than {MAX_BYTES // 1024**2} MiB")
    try:
        file = msgspec.json.decode(data, type=_File)
    except msgspec.ValidationError as exc:
        raise _wrong(where, str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        byte = _BYTE.search(str(exc))
        end = len(data) if byte is None else int(byte[1])  # it was truncated
        line = data.count(b"\n", 0, end) + 1
        raise _wrong(where, f"line {line}: {_BYTE.sub('', str(exc))}") from exc
    callers: dict[bytes, Caller] = {}
    names: set[str] = set()
    for place, key, caller in _entries(file):
        digest = _digest(key)
        if digest is None:
            raise _wrong(where, f"sha256: is followed by 64 hex digits - at `{place}`")
        if digest in callers:
            raise _wrong(where, f"the key is there twice - at `{place}`")
        callers[digest] = caller
    for index, entry in enumerate(file.tenants):
        if entry.name in names:
            place = f"$.tenants[{index}].name"
            raise _wrong(where, f"{entry.name!r} is there twice - at `{place}`")
        names.add(entry.name)
    return Keyring(callers)


def _entries(file: _File) -> Iterator[tuple[str, str, Caller]]:
    for index, entry in enumerate(file.tenants):
        caller = Caller(tenant=entry.tenant())
        for number, key in enumerate(entry.keys):
            yield f"$.tenants[{index}].keys[{number}]", key, caller
    for number, key in enumerate(file.admin_keys):
        yield f"$.admin_keys[{number}]", key, Caller(tenant=None)


def _digest(key: str) -> bytes | None:
    """The SHA-256 of a key that is given plainly, or as that; None if it is neither."""
    if not key.lower().startswith(_HASHED):
        return hashlib.sha256(key.encode()).digest()
    digits = key[len(_HASHED) :]
    return bytes.fromhex(digits) if _HEX.fullmatch(digits) else None


def _wrong(where: str, reason: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}={where}: {reason}")


logger = logging.getLogger("vllm.vllm_tts_cache")

LOOK_SECONDS = 1.0

_NOBODY_ELSE = Caller(tenant=ALONE)
_Version = tuple[int, int, int]


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
        self._keyring = Keyring({})
        self._version: _Version | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            self._keyring, self._version = _read(path)
            _warn_of_readers(path)

    @property
    def tenants(self) -> dict[str, Tenant]:
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
        if path is None:
            return
        version = _version_of(path)
        if version == self._version:
            return
        try:
            # Whole, and at once for whoever asks.
            self._keyring, self._version = _read(path)
        except ConfigError as exc:
            self._version = version  # one line, until it changes again
            logger.error("%s. The keys stay as they were.", exc)
        else:
            logger.info("Read the keys of %d tenants anew.", len(self.tenants))
            _warn_of_readers(path)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.reload()


def _read(path: Path) -> tuple[Keyring, _Version]:
    try:
        with path.open("rb") as file:
            version = _of_stat(os.fstat(file.fileno()))
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise ConfigError(f"{VARIABLE}={path}: {reason}") from exc
    return parse(data, str(path)), version


def _version_of(path: Path) -> _Version | None:
    try:
        return _of_stat(path.stat())
    except OSError:
        return None


def _of_stat(found: os.stat_result) -> _Version:
    return found.st_mtime_ns, found.st_size, found.st_ino


def _warn_of_readers(path: Path) -> None:
    if is_open_to_others(path):
        logger.warning(
            "%s=%s can be read by everybody on this machine: chmod 600 it.",
            VARIABLE,
            path,
        )


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
