"""``vllm-tts-cache doctor``: what is wrong or slow, and what to do about it.

This module checks the server at a URL; `doctor_checks` checks this machine.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import typer

from vllm_tts_cache import errors
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.entrypoints.cli import doctor_checks as checks
from vllm_tts_cache.logs import printable

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_NAME_WIDTH = 15
# A look-up over HTTP, on the same machine or in the same rack.
_SLOW_LOOK_MS = 50.0
# Counters of a worker that are 0 on a healthy server, and the hint if they are not.
_SIGNS = {
    "failed_prompts": "requests lost their voice in the engine",
    "corrupt": "stored encodings did not match: vllm-tts-cache verify",
    "tier_errors": "the disk could not answer: see the server's log",
}

doctor_app = common.new_app()


@doctor_app.command(
    epilog=common.examples(
        "vllm-tts-cache doctor",
        "vllm-tts-cache doctor --url http://gpu-7:8091 --quick",
        "vllm-tts-cache doctor --json | jq '.checks[] | select(.status != \"ok\")'",
    )
)
def doctor(
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="SPEAKER_URL",
            help="a server to look at; without, the one at the default URL",
        ),
    ] = None,
    api_key: common.ApiKey = None,
    directory: common.Directory = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="without importing torch and vLLM")
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Look for what is wrong or slow on this machine, and say what to do.

    Versions, whether vLLM will load the plugin, whether the wheels fit together, GPU
    and CPU, the directory of voices, the tenants, and the server. Status 1 if a line
    says fail.

    JSON: {"ok": true, "checks": [{"name", "status": "ok|warn|fail", "text", "hint"}]}.
    """
    found: list[checks.Finding] = []
    for each in _findings(url, api_key, directory, quick=quick):
        found.append(each)
        if not as_json:
            _print(each)
    is_ok = all(each.status != "fail" for each in found)
    if as_json:
        common.print_json({"ok": is_ok, "checks": [asdict(each) for each in found]})
    common.leave(0 if is_ok else common.FAILED)


def _findings(
    url: str | None, api_key: str | None, directory: common.Directory, *, quick: bool
) -> Iterator[checks.Finding]:
    from vllm_tts_cache.entrypoints.cli.voices.library import settings_of

    missing = None
    yield from checks.versions()
    yield from checks.plugins()
    if not quick:
        yield from checks.processors()
    try:
        load_settings()
        settings = settings_of(directory)
    except errors.ConfigError:
        pass  # `checks.plugins` has reported it
    else:
        yield from checks.storage(settings)
        yield from checks.tenants(settings)
        if not (settings.catalogue_url or (settings.samples_dir / "store").exists()):
            missing = settings.samples_dir
    yield from server(url, api_key, missing)


def _print(finding: checks.Finding) -> None:
    # None: coloured if the output is a terminal.
    colour = False if "NO_COLOR" in os.environ else None
    status = typer.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
    name = f"{finding.name:{_NAME_WIDTH}}"
    typer.echo(f"{status}  {name}  {printable(finding.text)}", color=colour)
    if finding.hint:
        typer.echo(f"{'':4}  {'':{_NAME_WIDTH}}  -> {printable(finding.hint)}")


def server(
    url: str | None, api_key: str | None, missing: Path | None
) -> Iterator[checks.Finding]:
    """Report on the server; it is no fault if none runs at the default URL."""
    try:
        client = common.client_of(url or common.DEFAULT_URL, api_key)
    except errors.ConnectionSettingError as exc:
        yield checks.fail("server", str(exc), "correct the variable, or unset it")
        return
    with client:
        try:
            models = client.request("GET", "/v1/models").get("data") or ()
            stats = client.request("GET", "/v1/audio/speaker_cache")
            took = checks.median_ms(lambda: client.find(checks.NO_VOICE), 5)
        except errors.ServerUnreachableError as exc:
            none = f"none at {common.DEFAULT_URL} (--url names another one)"
            text, hint = str(exc) if url else none, "start the server, or correct --url"
            yield checks.fail("server", text, hint, unless=url is None)
            return
        except errors.RouteMissingError:
            hint = "vllm-tts-cache is not loaded there: run the doctor beside it"
            yield checks.fail("server", f"{client.url} has no voices routes", hint)
            return
        except errors.ServerAnswerError as exc:
            is_key = exc.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            hint = "correct the key (--api-key)" if is_key else "see the server's log"
            yield checks.fail("server", str(exc), hint)
            return
    speakers = (stats.get("registry") or {}).get("speakers")
    workers = stats.get("workers") or ()
    counts = f"{speakers} voices, {len(workers)} workers"
    text = f"{client.url}: {counts}, {took:.1f} ms for a look-up"
    hint = "the server is busy or far away, or its disk is slow"
    yield checks.warn("server", text, hint, unless=took <= _SLOW_LOOK_MS)
    if speakers and missing and not url:  # it runs on this machine
        text = f"its voices are not in {missing}, where this doctor has looked"
        yield checks.warn("server", text, "set SPEAKER_SAMPLES_DIR as the server did")
    names = ", ".join(str(each.get("id")) for each in models)
    others = "clients that send tts-1 or gpt-4o-mini-tts need --served-model-name"
    yield checks.ok("model names", f"{names}; {others}")
    for name, meaning in _SIGNS.items():
        if num := sum(int(each.get(name) or 0) for each in workers):
            yield checks.warn(name, str(num), meaning)
