"""``vllm-tts-cache migrate``: a directory's voices into a fleet's store, or back."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tts_cache.config import VARIABLES, Settings, load_settings
from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.entrypoints.cli.style import examples, new_app
from vllm_tts_cache.errors import ConfigError

if TYPE_CHECKING:
    from vllm_tts_cache.store.migration import Report, Tell

_CATALOGUE, _STORE = "SPEAKER_CATALOGUE_URL", "SPEAKER_STORE_URL"

app = new_app()


@app.command(
    epilog=examples(
        "vllm-tts-cache migrate --from /srv/voices \\",
        "  --to postgresql://tts@db.internal/voices --to-store s3://bucket/voices",
        "SPEAKER_CATALOGUE_URL=... SPEAKER_STORE_URL=s3://bucket/voices \\",
        "  vllm-tts-cache migrate --to /srv/voices",
    )
)
def migrate(
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="a directory, or postgresql://...; else what the environment says",
        ),
    ] = None,
    from_store: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="where the files of a postgresql:// are: s3://, gs://, az://, "
            "file:/// or the directory that its servers share",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="a directory, or postgresql://...; else what the environment says",
        ),
    ] = None,
    to_store: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="as --from-store, of --to"),
    ] = None,
    as_json: style.Json = False,
) -> None:
    """Copy all voices into an empty store, and compare the two.

    Voices keep their ids, dates, labels, consents and encodings; inline audio stays
    behind. Servers of both are stopped meanwhile. The source is only read. Interrupted
    or killed, it goes on when it is run again; until it is done no server opens the
    copy.

    A password in an argument is seen by who lists processes: leave --from or --to out
    and set SPEAKER_CATALOGUE_URL, or use PGPASSFILE.

    Status: 0 all is there and equal, 1 it failed or something differs, 2 it was
    refused and nothing was copied.

    JSON: {"from", "to", "voices", "consents", "files", "copied_files", "was_done",
    "problems": [...]}.
    """
    from vllm_tts_cache.store.migration import migrate as migrate_

    if from_ is None and to is None:
        raise ConfigError("Give --from, --to or both.")
    with (
        _settings(from_, from_store, "--from") as source,
        _settings(to, to_store, "--to") as target,
        _progress() as tell,
    ):
        report = migrate_(source, target, tell)
    if as_json:
        style.print_json(_plain(report))
    else:
        _print(report)
    style.leave(style.FAILED if report.problems else 0)


@contextmanager
def _settings(
    place: str | None, store: str | None, option: str
) -> Generator[Settings, None, None]:
    """The settings of a store, with a directory for copies that goes if it is remote.

    Raises: ConfigError.
    """
    if place is None and store is not None:
        raise ConfigError(f"{option}-store is given, and {option} is not.")
    settings = load_settings()
    if place is not None:
        settings = _described(settings, place, store, option)
    if not settings.store_url:
        directory = settings.samples_dir.expanduser().absolute()
        yield replace(settings, samples_dir=directory)
        return
    with tempfile.TemporaryDirectory(prefix="tts-cache-migrate-") as copies:
        yield replace(settings, samples_dir=Path(copies))


def _described(
    settings: Settings, place: str, store: str | None, option: str
) -> Settings:
    if "://" not in place:
        if store is not None:
            raise ConfigError(
                f"{option}-store is of a {option} postgresql://...: a directory "
                "has its files in itself"
            )
        path = Path(place)
        return replace(settings, samples_dir=path, catalogue_url="", store_url="")
    url = _parsed(_CATALOGUE, place, option)
    if store is None:
        raise ConfigError(
            f"{option} names a database: say with {option}-store where its files are, "
            "s3://bucket/prefix, or the directory that its servers share"
        )
    if "://" not in store:
        path = Path(store)
        return replace(settings, samples_dir=path, catalogue_url=url, store_url="")
    bucket = _parsed(_STORE, store, f"{option}-store")
    return replace(settings, catalogue_url=url, store_url=bucket)


def _parsed(variable: str, text: str, option: str) -> str:
    try:
        return VARIABLES[variable][1](text)
    except ValueError as exc:
        raise ConfigError(f"{option}=(not shown): {exc}") from None


@contextmanager
def _progress() -> Generator["Tell", None, None]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield tell


def _plain(report: "Report") -> dict[str, Any]:
    return {
        "from": report.source,
        "to": report.target,
        "voices": report.num_voices,
        "consents": report.num_consents,
        "files": report.num_files,
        "copied_files": report.num_copied,
        "was_done": report.was_done,
        "problems": report.problems,
    }


def _print(report: "Report") -> None:
    has = f"{report.num_voices} voices, {report.num_files} files"
    for line in report.problems:
        style.say(f"not equal: {line}")
    if report.problems:
        style.say("Not done: the copy stays closed. Run it again.")
    elif report.was_done:
        style.say(
            f"{report.target}: all was copied before ({has} by now); nothing was done."
        )
    else:
        style.say(
            f"{report.target}: {has}, all equal to {report.source}; this run copied "
            f"{report.num_copied} files."
        )
