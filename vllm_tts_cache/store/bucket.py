"""An object store: bytes by name, in a bucket of S3, Google Cloud or Azure.

By obstore, which takes credentials as each provider's own tools do, from variables of
the environment, files and instance metadata.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import ObjectStore, from_url

from vllm_tts_cache.errors import ConfigError, ObjectStoreError

T = TypeVar("T")

_CONNECT_SECONDS = 3.0
# Of a whole answer. The longest encoding is some megabytes; ten minutes of audio, 50.
_ANSWER_SECONDS = 20.0
_READ_SECONDS = 10.0
_MAX_RETRIES = 2
_RETRY_SECONDS = 15.0
_RETRY_AFTER_SECONDS = 5
_DELETED_AT_ONCE = 500


class Bucket:
    """Objects under a URL; safe in any thread.

    Of a process that has used one, no forked child can use any.

    Every method raises ObjectStoreError where the store does not do it: down, slow,
    refusing, or answering what is none.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///directory``.
        is_plain: Whether HTTP without encryption will do.

    Raises: ConfigError: It is no such URL.
    """

    _process = 0  # which uses one

    def __init__(self, url: str, *, is_plain: bool = False):
        self.where = shown(url)
        options: dict[str, Any] = {"mkdir": True, "automatic_cleanup": True}
        if not url.startswith("file:"):
            options = {
                "client_options": {
                    "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                    "read_timeout": timedelta(seconds=_READ_SECONDS),
                    "timeout": timedelta(seconds=_ANSWER_SECONDS),
                    "allow_http": is_plain,
                },
                "retry_config": {
                    "max_retries": _MAX_RETRIES,
                    "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
                },
            }
        try:
            self._store: ObjectStore = from_url(url, **options)
        except (BaseError, ValueError, TypeError) as exc:
            raise ConfigError(f"SPEAKER_STORE_URL={self.where}: {_first(exc)}") from exc

    def put(self, name: str, data: bytes) -> None:
        """Make an object, whole or not at all; over what is there."""
        self._do(lambda store: obstore.put(store, name, data, use_multipart=False))

    def get(self, name: str) -> bytes | None:
        """An object's bytes; None if there is none, or no bucket."""
        with suppress(FileNotFoundError):
            return self._do(lambda store: bytes(obstore.get(store, name).bytes()))
        return None

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are none to remove."""
        for start in range(0, len(names), _DELETED_AT_ONCE):
            some = list(names[start : start + _DELETED_AT_ONCE])
            self._do(lambda store, some=some: _delete(store, some))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Names and bytes of all objects whose names begin with directories."""
        listed = self._do(lambda store: obstore.list(store, prefix))
        while some := self._do(lambda _: next(listed, None)):
            for meta in some:
                yield str(meta["path"]), int(meta["size"])

    def folders(self, prefix: str) -> list[str]:
        """The last parts of the directories that names go on with."""
        listed = self._do(lambda store: obstore.list_with_delimiter(store, prefix))
        return [str(path).rpartition("/")[2] for path in listed["common_prefixes"]]

    def _do(self, act: Callable[[ObjectStore], T]) -> T:
        # The first use in a process starts obstore's threads, which cannot be started
        # again: a forked child would wait for those that were left behind.
        if Bucket._process not in (0, os.getpid()):
            raise self._error("this process was forked from one that had used it")
        Bucket._process = os.getpid()
        try:
            return act(self._store)
        except FileNotFoundError:
            raise
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            raise self._error(f"it refuses our credentials ({_first(exc)})") from None
        # obstore raises OSError for a directory, and Python's own for what is no name.
        except (BaseError, OSError, ValueError) as exc:
            raise self._error(_first(exc)) from None

    def _error(self, detail: str) -> ObjectStoreError:
        return ObjectStoreError(self.where, detail, _RETRY_AFTER_SECONDS)


def shown(url: str) -> str:
    """A URL as logs and people may see it: without what is before an ``@``."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _delete(store: ObjectStore, names: list[str]) -> None:
    # A directory says that one is not there; services do not.
    try:
        obstore.delete(store, names)
    except FileNotFoundError:
        for name in names:
            with suppress(FileNotFoundError):
                obstore.delete(store, name)


def _first(error: BaseException) -> str:
    """What went wrong: without obstore's account of its own insides."""
    text = str(error).split("Debug source")[0]
    return " ".join(text.split()).rstrip(".")[:300] or type(error).__name__
