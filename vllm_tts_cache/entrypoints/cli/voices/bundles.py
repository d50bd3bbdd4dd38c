"""``voices export`` and ``voices import``: voices as files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.entrypoints.cli.style import examples
from vllm_tts_cache.entrypoints.cli.voices.choosing import (
    All,
    Chosen,
    Names,
    chosen_of,
    file_names,
)
from vllm_tts_cache.entrypoints.cli.voices.saving import whole_file
from vllm_tts_cache.entrypoints.cli.voices.source import (
    DEFAULT_URL,
    ApiKey,
    Directory,
    Jobs,
    Labels,
    OnConflict,
    Search,
    TenantName,
    Url,
    Voices,
    voices_of,
)
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.files import storage_errors

if TYPE_CHECKING:
    from vllm_tts_cache.entrypoints.cli.voices.bulk import Outcome, Stop

_SUFFIX = ".voice"
_RESUME = "Run the same command again to go on: what the server has is left alone."


def export(
    names: Names = None,
    all_: All = False,
    search: Search = None,
    label: Labels = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="where to; made if it is not there"
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tar",
            help="one file for all of them; - is the standard output",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="replace files that are there")
    ] = False,
    jobs: Jobs = 2,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    directory: Directory = None,
    tenant: TenantName = None,
    as_json: style.Json = False,
) -> None:
    """Save voices as files, one NAME.voice each: audio, texts, consent and encodings.

    With --archive they go into one tar file, one after the other. It says at its end
    what failed and is missing; cut short, no file is left, and a stream has no end.

    JSON: {"counts", "interrupted", "voices": [{"name", "outcome":
    "exported|failed|not_tried", "file", "bytes", "error"}]}.
    """
    from vllm_tts_cache.entrypoints.cli.voices.archives import save_archive
    from vllm_tts_cache.entrypoints.cli.voices.bulk import in_parallel, patiently

    if archive is not None and out is not None:
        raise ConfigError("give --out or --archive, not both")
    with voices_of(url, api_key, directory, tenant) as source:
        chosen = chosen_of(source, names, all_, {"search": search, "label": label})
        if archive is not None:
            save_archive(
                source, chosen, archive, force=force, jobs=jobs, as_json=as_json
            )
            return
        folder = out or Path()
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

        paths = {
            voice: folder / f"{name}{_SUFFIX}"
            for voice, name in file_names(chosen).items()
        }

        def one(voice: Chosen, stop: "Stop") -> "Outcome":
            path = paths[voice]
            return patiently(lambda: _save(source, voice, path, force=force), stop)

        many = in_parallel(
            chosen,
            one,
            name=lambda voice: voice.name,
            title="exporting",
            num_jobs=jobs,
        )
    many.report("voices", as_json=as_json, hint="Run it again with --force.")


def _save(source: Voices, voice: Chosen, path: Path, *, force: bool) -> "Outcome":
    from vllm_tts_cache.entrypoints.cli.voices.bulk import Outcome

    with whole_file(path, force=force) as file:
        num_bytes = source.save_bundle(voice.ref, file)
    details = {"file": str(path), "bytes": num_bytes}
    return Outcome(name=voice.name, outcome="exported", details=details)


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="- is an archive on the standard input"),
    ],
    name: Annotated[
        str | None, typer.Option(help="of the voice, if the file holds one")
    ] = None,
    on_conflict: Annotated[
        OnConflict,
        typer.Option(help="what to do where another voice has the name"),
    ] = "fail",
    jobs: Jobs = 2,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    directory: Directory = None,
    tenant: TenantName = None,
    as_json: style.Json = False,
) -> None:
    """Register the voices of files that `voices export` wrote, archives included.

    A voice that the server has with the same clip and the same texts is left alone, so
    a run that was cut short goes on when it is run again. Encodings are taken of files
    that this server signed, or one with the same SPEAKER_BUNDLE_KEY; the others are
    made anew. With --directory that is done to a stopped server's voices, without what
    its model would refuse.

    JSON: {"counts", "interrupted", "files": [{"name": the file, or FILE.tar:NAME,
    "outcome": "imported|unchanged|failed|not_tried", "imported": as the server answers
    it, "error"}]}.
    """
    from vllm_tts_cache.entrypoints.cli.voices.archives import (
        Importing,
        bundles_of,
        holds_many,
    )
    from vllm_tts_cache.entrypoints.cli.voices.bulk import in_parallel

    if name is not None and (len(files) > 1 or holds_many(files[0])):
        raise ConfigError("--name: give it with one file of one voice")
    with voices_of(url, api_key, directory, tenant, writes=True) as target:
        importing = Importing(target, name, on_conflict)
        many = in_parallel(
            bundles_of(files),
            importing.add,
            name=lambda given: given.shown,
            title="importing",
            num_jobs=jobs,
        )
    if not as_json:
        for each in many.outcomes:
            for imported in each.details.get("imported") or ():
                style.say(f"{each.name}: {_imported(imported)}")
    many.report("files", as_json=as_json, hint=_RESUME)


def _imported(found: dict[str, Any]) -> str:
    kept, left = found.get("encodings_kept"), found.get("encodings_left")
    name = (found.get("voice") or {}).get("name")
    return f"{name} ({kept} encodings taken, {left} made anew)"


COMMANDS = {
    "export": (
        export,
        examples(
            "vllm-tts-cache voices export keeper",
            "vllm-tts-cache voices export --all --out backup/",
            "vllm-tts-cache voices export --all --out b/ --directory /srv/speakers",
            "# all in one file, or from one server to another",
            "vllm-tts-cache voices export --all --archive voices.tar",
            "vllm-tts-cache voices export --all --archive - \\",
            "  | vllm-tts-cache voices import - --url http://other:8091",
        ),
    ),
    "import": (
        import_,
        examples(
            "vllm-tts-cache voices import keeper.voice --name keeper-2",
            "vllm-tts-cache voices import backup/*.voice --on-conflict replace",
            "# into a directory whose server is stopped",
            "vllm-tts-cache voices import backup/*.voice --directory /srv/speakers",
            "# run it again to go on after Ctrl-C",
            "vllm-tts-cache voices import voices.tar --jobs 8",
        ),
    ),
}
