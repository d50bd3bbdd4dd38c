"""The directory of voices: whether it can be used, and how fast it is."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.cli.doctor.finding import (
    Finding,
    fail,
    median_ms,
    ok,
    warn,
)
from vllm_tts_cache.errors import (
    ConfigError,
    NoCatalogueError,
    StorageError,
    StorageUnavailableError,
)
from vllm_tts_cache.files import PARTIAL_PREFIX, shared_file_system, write_private

_GIB = 1024**3
_MIN_FREE_BYTES = _GIB
# A registration waits for about three of them.
_SLOW_SYNC_MS = 50.0
# Every request with a voice takes one on the event loop.
_SLOW_LOOK_MS = 2.0
_NO_VOICE = "no voice of this name, says the doctor"


def storage(settings: Settings) -> Iterator[Finding]:
    """Say what is wrong or slow with ``SPEAKER_SAMPLES_DIR``."""
    directory = settings.samples_dir
    there = _first_there(directory)
    if there != directory:
        text = f"{directory} is not there yet; a server makes it"
        if os.access(there, os.W_OK | os.X_OK) and there.is_dir():
            yield ok("directory", text)
        else:
            yield fail("directory", text, f"nobody may write in {there}: chown it")
    else:
        yield from _permissions(directory)
    yield from _room(there, settings)
    kind = shared_file_system(there)
    if kind is None:
        yield ok("file system", "local")
    elif settings.catalogue_url:
        hint = (
            "it may refuse the locks that storing needs: a local disk for each "
            "machine, and a bucket that all share (SPEAKER_STORE_URL)"
        )
        yield warn("file system", kind, hint)
    else:
        hint = (
            "one host only may use it: a local disk is faster (SPEAKER_SAMPLES_DIR), "
            "several hosts need the catalogue on PostgreSQL (SPEAKER_CATALOGUE_URL) "
            "and a bucket (SPEAKER_STORE_URL)"
        )
        yield warn("file system", kind, hint)
    is_usable = os.access(directory, os.R_OK | os.W_OK | os.X_OK)
    if there == directory and is_usable:
        yield from _sync(directory)
    if settings.catalogue_url or (there == directory and is_usable):
        yield from _catalogue(settings)


def _permissions(directory: Path) -> Iterator[Finding]:
    if not directory.is_dir():
        hint = "point SPEAKER_SAMPLES_DIR to a directory"
        yield fail("directory", f"{directory} is none", hint)
        return
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        hint = "run as its owner, or chown it"
        yield fail("directory", f"{directory} cannot be read and written", hint)
        return
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        hint = f"others may look at voices: chmod 700 {directory}"
        yield warn("directory", f"{directory} (mode {mode:o})", hint)
    else:
        yield ok("directory", str(directory))


def _room(there: Path, settings: Settings) -> Iterator[Finding]:
    free = shutil.disk_usage(there).free
    budgets = (
        settings.audio_max_bytes,
        settings.inline_audio_max_bytes,
        settings.disk_max_bytes,
    )
    text = f"{free / _GIB:.1f} GiB free, budgets of {sum(budgets) / _GIB:.1f} GiB"
    if free < _MIN_FREE_BYTES:
        yield fail("space", text, "free some, or point SPEAKER_SAMPLES_DIR elsewhere")
    elif free < sum(budgets):
        hint = "the disk may be full before the budgets are (SPEAKER_CACHE_*_MAX_BYTES)"
        yield warn("space", text, hint)
    else:
        yield ok("space", text)


def _sync(directory: Path) -> Iterator[Finding]:
    def write() -> None:
        write_private(directory, b"doctor", PARTIAL_PREFIX).unlink()

    try:
        took = median_ms(write, 5)
    except OSError as exc:
        hint = "a server could not store voices: mend the disk"
        yield fail("fsync", f"{exc.strerror or exc}", hint)
        return
    text = f"{took:.1f} ms to write a file durably"
    if took > _SLOW_SYNC_MS:
        yield warn("fsync", text, "registering is slow here; another disk helps")
    else:
        yield ok("fsync", text)


def _catalogue(settings: Settings) -> Iterator[Finding]:
    from vllm_tts_cache.store.opening import open_existing

    try:
        store = open_existing(settings)
    except NoCatalogueError:
        yield ok("catalogue", "no server has stored voices there yet")
        return
    except ConfigError as exc:
        yield fail("catalogue", str(exc), "one of these settings is another server's")
        return
    except StorageError as exc:
        yield _broken(exc)
        return
    try:
        took = median_ms(lambda: store.find(_NO_VOICE), 50)
        text = (
            f"{store.catalogue.database.where}: {store.catalogue.count()} voices, "
            f"{store.num_alive()} API servers at work, {took:.2f} ms for a look-up"
        )
        if settings.catalogue_url and not settings.store_url:
            text += "; servers on it share one directory"
        if took > _SLOW_LOOK_MS:
            hint = "each request takes one: a local disk, or a less busy machine, helps"
            yield warn("catalogue", text, hint)
        else:
            yield ok("catalogue", text)
        if num := len(store.unfinished_deletions()):
            hint = "a running server goes on with them; else vllm-tts-cache gc"
            yield warn("deletions", f"{num} are not finished", hint)
    except StorageError as exc:
        yield _broken(exc)
    finally:
        store.close()


def _broken(error: StorageError) -> Finding:
    if isinstance(error, StorageUnavailableError):
        hint = "start PostgreSQL there, or correct SPEAKER_CATALOGUE_URL"
        return fail("catalogue", error.log_text, hint)
    return fail("catalogue", str(error), "vllm-tts-cache verify says more")


def _first_there(path: Path) -> Path:
    return next((each for each in (path, *path.parents) if each.exists()), path)
