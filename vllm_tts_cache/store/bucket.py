"""An object store: bytes by name, in a bucket of S3, Google Cloud or Azure.

It uses obstore, which takes credentials as each provider's own tools do: from
environment variables, files and instance metadata.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore, S3Store, from_url

from vllm_tts_cache.errors import ConfigError, ObjectStoreError

T = TypeVar("T")

_CONNECT_SECONDS = 3.0
# For a whole answer. The longest encoding is some megabytes; ten minutes of audio, 50.
_ANSWER_SECONDS = 20.0
_READ_SECONDS = 10.0
_MAX_RETRIES = 2
_RETRY_SECONDS = 15.0
_DELETED_AT_ONCE = 500


class Bucket:
    """Objects under a URL; safe in any thread.

    A forked child of a process that has used a bucket cannot use any.

    Every method raises ObjectStoreError if the store is down or slow, or if it refuses
    the request or gives an invalid answer.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///directory``.
        is_plain: Whether HTTP without encryption is allowed.

    Raises: ConfigError: ``url`` is no such URL.
    """

    _process = 0  # the id of the process that has used a bucket

    def __init__(self, url: str, *, is_plain: bool = False):
        self.where = shown(url)
        client = {
            "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
            "read_timeout": timedelta(seconds=_READ_SECONDS),
            "timeout": timedelta(seconds=_ANSWER_SECONDS),
            "allow_http": is_plain,
        }
        retry_timeout = timedelta(seconds=_RETRY_SECONDS)
        retries = {"max_retries": _MAX_RETRIES, "retry_timeout": retry_timeout}
        options: dict[str, Any] = {"client_options": client, "retry_config": retries}
        if url.startswith("file:"):
            options = {"mkdir": True, "automatic_cleanup": True}
        try:
            self._store: ObjectStore = from_url(url, **options)
        except (BaseError, ValueError, TypeError) as exc:
            raise ConfigError(f"SPEAKER_STORE_URL={self.where}: {_first(exc)}") from exc

    def put(self, name: str, data: bytes, *, is_new: bool = False) -> None:
        """Store an object, whole or not at all, in place of the one with its name.

        With ``is_new`` the old one stays, except on S3 servers without conditions.
        """
        how: Any = {"mode": "create" if is_new else "overwrite", "use_multipart": False}
        with suppress(AlreadyExistsError):
            self._do(lambda store: obstore.put(store, name, data, **how))

    def get(self, name: str) -> bytes | None:
        """Return an object's bytes; None if it is missing, or the bucket is."""

        def fetched(store: ObjectStore) -> bytes | None:
            with suppress(FileNotFoundError):
                return bytes(obstore.get(store, name).bytes())
            return None

        return self._do(fetched)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; a missing one is no error."""
        for start in range(0, len(names), _DELETED_AT_ONCE):
            some = list(names[start : start + _DELETED_AT_ONCE])
            self._do(lambda store, some=some: _delete(store, some))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield name and size in bytes of each object under the path ``prefix``."""
        listed = self._do(lambda store: obstore.list(store, prefix))
        while some := self._do(lambda _: next(listed, None)):
            for meta in some:
                yield str(meta["path"]), int(meta["size"])

    def folders(self, prefix: str) -> list[str]:
        """Return the last segments of the paths directly under ``prefix``."""
        listed = self._do(lambda store: obstore.list_with_delimiter(store, prefix))
        return [str(path).rpartition("/")[2] for path in listed["common_prefixes"]]

    def _do(self, act: Callable[[ObjectStore], T]) -> T:
        # The first use in a process starts obstore's threads, which cannot be started
        # again: a forked child does not have them and would wait for them forever.
        if Bucket._process not in (0, os.getpid()):
            reason = "this process was forked from one that had used it"
            raise ObjectStoreError(self.where, reason)
        Bucket._process = os.getpid()
        try:
            return act(self._store)
        except AlreadyExistsError:
            raise
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            reason = f"it refuses our credentials ({_first(exc)})"
            raise ObjectStoreError(self.where, reason) from None
        # obstore raises OSError for file:///, and Python's errors for an invalid name.
        except (BaseError, OSError, ValueError) as exc:
            raise ObjectStoreError(self.where, _first(exc)) from None


def shown(url: str) -> str:
    """Return a URL for logs and messages, without what is before an ``@``."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _delete(store: ObjectStore, names: list[str]) -> None:
    try:
        obstore.delete(store, names)
    except FileNotFoundError:
        # Other stores raise if one is missing; S3 only if its whole bucket is, and
        # then it has removed nothing.
        if isinstance(store, S3Store):
            raise
        for name in names:
            with suppress(FileNotFoundError):
                obstore.delete(store, name)


def _first(error: BaseException) -> str:
    """Return the error's text, without the debug source that obstore adds."""
    text = str(error).split("Debug source")[0]
    return " ".join(text.split()).rstrip(".")[:300] or type(error).__name__
