"""The server at a URL: whether it is one of ours, and how it is."""

from collections.abc import Iterator
from typing import Any

from vllm_tts_cache.entrypoints.cli.doctor.finding import (
    Finding,
    fail,
    median_ms,
    ok,
    warn,
)
from vllm_tts_cache.entrypoints.cli.voices.source import DEFAULT_URL, client_of
from vllm_tts_cache.errors import (
    RouteMissingError,
    ServerAnswerError,
    ServerUnreachableError,
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


def server(url: str | None, api_key: str | None) -> Iterator[Finding]:
    """Say how the server is; that the default one does not run is no fault."""
    with client_of(url or DEFAULT_URL, api_key) as client:
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
    text = f"{client.url}: {_sum_up(stats)}, {took:.1f} ms for a look-up"
    if took > _SLOW_LOOK_MS:
        yield warn("server", text, "it is busy, far away, or its disk is slow")
    else:
        yield ok("server", text)
    yield from _signs(stats)


def _sum_up(stats: dict[str, Any]) -> str:
    speakers = (stats.get("registry") or {}).get("speakers")
    return f"{speakers} voices, {len(stats.get('workers') or ())} workers"


def _signs(stats: dict[str, Any]) -> Iterator[Finding]:
    for name, meaning in _SIGNS.items():
        num = sum(int(each.get(name) or 0) for each in stats.get("workers") or ())
        if num:
            yield warn(name, str(num), meaning)
