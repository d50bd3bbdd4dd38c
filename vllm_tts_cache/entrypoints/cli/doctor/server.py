"""The server at a URL: whether it is one of ours, and how it is."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from vllm_tts_cache.client import VoicesClient, is_this_machine
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.cli.common import DEFAULT_URL, client_of
from vllm_tts_cache.entrypoints.cli.doctor.checks import (
    Finding,
    fail,
    median_ms,
    ok,
    warn,
)
from vllm_tts_cache.errors import (
    ConfigError,
    ConnectionSettingError,
    NoCatalogueError,
    RemoteError,
    RouteMissingError,
    ServerAnswerError,
    ServerUnreachableError,
    StorageError,
)

# Over HTTP, on the same machine or in the same rack.
_SLOW_LOOK_MS = 50.0
_NO_VOICE = "no voice of this name, says the doctor"
# Counters of a worker that are 0 on a healthy server, and what they say.
_SIGNS = {
    "failed_prompts": "requests lost their voice in the engine",
    "corrupt": "stored encodings did not match: vllm-tts-cache verify",
    "tier_errors": "the disk could not answer: see the server's log",
}


def server(
    url: str | None, api_key: str | None, settings: Settings | None
) -> Iterator[Finding]:
    """Say how the server is; that the default one does not run is no fault.

    Args:
        url: None for the default one.
        api_key: The key to ask with.
        settings: Of the directory that was looked at; None if they are wrong.
    """
    try:
        client = client_of(url or DEFAULT_URL, api_key)
    except ConnectionSettingError as exc:
        yield fail("server", str(exc), "correct the variable, or unset it")
        return
    with client:
        try:
            stats = client.request("GET", "/v1/audio/speaker_cache")
            took = median_ms(lambda: client.find(_NO_VOICE), 5)
        except ServerUnreachableError as exc:
            if url is None:
                yield ok("server", f"none at {DEFAULT_URL} (--url names another one)")
            else:
                yield fail("server", str(exc), "start it, or correct the URL")
            return
        except RouteMissingError:
            hint = "vllm-tts-cache is not loaded there: run the doctor beside it"
            yield fail("server", f"{client.url} answers, but not as ours", hint)
            return
        except ServerAnswerError as exc:
            hint = (
                "is the API key right (--api-key)?" if exc.status == 401 else "its log"
            )
            yield fail("server", str(exc), hint)
            return
        compared = list(_whose_voices(client, settings)) if settings else []
    text = f"{client.url}: {_sum_up(stats)}, {took:.1f} ms for a look-up"
    if took > _SLOW_LOOK_MS:
        yield warn("server", text, "it is busy, far away, or its disk is slow")
    else:
        yield ok("server", text)
    yield from compared
    yield from _signs(stats)


def _whose_voices(client: VoicesClient, settings: Settings) -> Iterator[Finding]:
    """Say whether the directory that was looked at is the server's."""
    is_here = is_this_machine(urlsplit(client.url).hostname or "")
    if not is_here and not settings.catalogue_url:
        return  # its directory is on its machine
    try:
        newest = next(client.voices(limit=1, sort="newest"), None)
        is_same = _is_kept(newest, settings)
    except (RemoteError, ConfigError, StorageError):
        return  # an administrator's key sees no voices; a catalogue was said above
    if is_same:
        yield ok("voices", "the server's are those of this directory")
    else:
        hint = (
            "set SPEAKER_SAMPLES_DIR here as the server has it, or give --directory: "
            "verify and gc would look at this one, too"
        )
        where = settings.samples_dir
        yield warn("voices", f"{client.url} does not keep its voices in {where}", hint)


def _is_kept(voice: dict[str, Any] | None, settings: Settings) -> bool:
    """Whether a running server whose newest voice this is uses the directory.

    Raises: ConfigError, StorageError.
    """
    from vllm_tts_cache.store.opening import open_existing

    try:
        store = open_existing(settings)
    except NoCatalogueError:
        return False
    try:
        if not store.participants.num_alive():
            return False
        tenants = store.usage_of_tenants()
        if voice is None:  # with tenants, this key has none
            return settings.tenants_file is not None or not store.num_speakers()
        return any(store.find(voice["id"], tenant) for tenant in tenants)
    finally:
        store.close()


def _sum_up(stats: dict[str, Any]) -> str:
    speakers = (stats.get("registry") or {}).get("speakers")
    return f"{speakers} voices, {len(stats.get('workers') or ())} workers"


def _signs(stats: dict[str, Any]) -> Iterator[Finding]:
    for name, meaning in _SIGNS.items():
        num = sum(int(each.get(name) or 0) for each in stats.get("workers") or ())
        if num:
            yield warn(name, str(num), meaning)
