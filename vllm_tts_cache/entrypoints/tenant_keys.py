"""Whose key a request has, by a file that may change while the server is at work."""

import logging
import os
import stat
import threading
from pathlib import Path

from vllm_tts_cache import tenants
from vllm_tts_cache.errors import ConfigError, UnauthorizedError
from vllm_tts_cache.tenants import ALONE, Caller, Keyring, Tenant

logger = logging.getLogger("vllm.vllm_tts_cache")

LOOK_SECONDS = 1.0

_NOBODY_ELSE = Caller(tenant=ALONE)
_Version = tuple[int, int, int]


class TenantKeys:
    """The keys of ``SPEAKER_TENANTS_FILE``; any thread may ask.

    Args:
        path: None where there are no tenants: then everybody is the one that there is.

    Raises:
        ConfigError: The file cannot be read, or is wrong.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._keyring = Keyring({})
        self._version: _Version | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            self._keyring, self._version = _read(path)
            _warn_of_readers(path)

    @property
    def is_on(self) -> bool:
        """Whether there are tenants."""
        return self._path is not None

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
            data = file.read(tenants.MAX_BYTES + 1)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise ConfigError(f"{tenants.VARIABLE}={path}: {reason}") from exc
    return tenants.parse(data, str(path)), version


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
            tenants.VARIABLE,
            path,
        )


def is_open_to_others(path: Path) -> bool:
    """Whether whoever is not of the owner's group may read the file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False
