"""``vllm-tts-cache doctor``: what is wrong or slow, and what to do about it."""

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.entrypoints.cli.common import ApiKey, Directory, examples, new_app
from vllm_tts_cache.entrypoints.cli.doctor import checks, server
from vllm_tts_cache.entrypoints.cli.doctor.checks import Finding
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.logs import printable

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_NAME_WIDTH = 15

doctor_app = new_app()


@doctor_app.command(
    epilog=examples(
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
    api_key: ApiKey = None,
    directory: Directory = None,
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
    found: list[Finding] = []
    for each in _findings(url, api_key, directory, quick=quick):
        found.append(each)
        if not as_json:
            _print(each)
    is_ok = all(each.status != "fail" for each in found)
    if as_json:
        checks = [each.plain() for each in found]
        common.print_json({"ok": is_ok, "checks": checks})
    common.leave(0 if is_ok else common.FAILED)


def _findings(
    url: str | None, api_key: str | None, directory: Directory, *, quick: bool
) -> Iterator[Finding]:
    from vllm_tts_cache.entrypoints.cli.voices.library import settings_of

    yield from checks.versions()
    yield from checks.plugins()
    if not quick:
        yield from checks.processors()
    settings = None
    try:
        load_settings()
        settings = settings_of(directory)
    except ConfigError:
        pass  # it was said above
    else:
        yield from checks.storage(settings)
        yield from checks.tenants(settings)
    yield from server.server(url, api_key, settings)


def _print(finding: Finding) -> None:
    # None: as the output is a terminal or not.
    colour = False if "NO_COLOR" in os.environ else None
    status = typer.style(f"{finding.status:4}", fg=_COLOURS[finding.status])
    name = f"{finding.name:{_NAME_WIDTH}}"
    typer.echo(f"{status}  {name}  {printable(finding.text)}", color=colour)
    if finding.hint:
        typer.echo(f"{'':4}  {'':{_NAME_WIDTH}}  -> {printable(finding.hint)}")
