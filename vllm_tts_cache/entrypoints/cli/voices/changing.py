"""``voices warm``, ``voices edit`` and ``voices rm``."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.entrypoints.cli.style import examples, pairs
from vllm_tts_cache.entrypoints.cli.voices.listing import (
    All,
    Chosen,
    Names,
    chosen_of,
    print_fields,
)
from vllm_tts_cache.entrypoints.cli.voices.source import (
    DEFAULT_URL,
    ApiKey,
    Directory,
    Jobs,
    Labels,
    Search,
    TenantName,
    Url,
    Voices,
    client_of,
    voices_of,
)
from vllm_tts_cache.errors import (
    ConfigError,
    RouteMissingError,
    ServerAnswerError,
    SpeakerNotFoundError,
)

if TYPE_CHECKING:
    from vllm_tts_cache.entrypoints.cli.voices.bulk import Outcome, Stop

_NOT_FOUND = 404

_FIELDS = {
    "description": "speaker_description",
    "language": "language",
    "ref-text": "ref_text",
    "labels": "labels",
    "expires-at": "expires_at",
}


def _clearable(fields: list[str] | None) -> list[str] | None:
    for field in fields or ():
        if field not in _FIELDS:
            raise typer.BadParameter(f"{field!r} is none of {', '.join(_FIELDS)}")
    return fields


def warm(
    names: Names = None,
    all_: All = False,
    search: Search = None,
    label: Labels = None,
    force: Annotated[
        bool, typer.Option("--force", help="encode anew, and replace what is there")
    ] = False,
    jobs: Jobs = 4,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: style.Json = False,
) -> None:
    """Make the encodings of voices exist, and wait until they do.

    Several give way to running streams; a single one is made at once.

    JSON: {"counts", "interrupted", "voices": [{"name", "outcome":
    "ready|failed|not_tried", "error"}]}.
    """
    from vllm_tts_cache.entrypoints.cli.voices.bulk import (
        Outcome,
        Stop,
        in_parallel,
        made_in_turn,
        patiently,
    )

    def one(voice: Chosen, stop: Stop) -> Outcome:
        if len(chosen) == 1:
            patiently(lambda: client.precompute(voice.ref, force=force), stop)
        else:
            made_in_turn(client, voice.ref, stop, force=force)
        return Outcome(name=voice.name, outcome="ready")

    with client_of(url, api_key) as client:
        chosen = chosen_of(client, names, all_, {"search": search, "label": label})
        many = in_parallel(
            chosen,
            one,
            name=lambda voice: voice.name,
            title="encoding",
            num_jobs=jobs,
        )
    many.report("voices", as_json=as_json, hint="Run it again to go on.")


def edit(
    name: Annotated[str, typer.Argument(help="or id")],
    new_name: Annotated[str | None, typer.Option("--name", help="rename it")] = None,
    description: Annotated[str | None, typer.Option(help="free text")] = None,
    language: Annotated[str | None, typer.Option(help="as de or pt-BR")] = None,
    ref_text: Annotated[
        str | None, typer.Option(help="what is said in the clip")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY:VALUE", help="add or change; repeatable"),
    ] = None,
    unlabel: Annotated[
        list[str] | None,
        typer.Option("--unlabel", metavar="KEY", help="take away; repeatable"),
    ] = None,
    expires_at: Annotated[
        str | None, typer.Option(help="ISO 8601, or Unix seconds; deleted then")
    ] = None,
    clear: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(_FIELDS),
            callback=_clearable,
            autocompletion=lambda: list(_FIELDS),
            help="take away; repeatable",
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: style.Json = False,
) -> None:
    """Change what is written beside a voice; its audio and its id stay.

    JSON: what `PATCH /v1/audio/voices/NAME` answers.
    """
    given: dict[str, Any] = {
        "name": new_name,
        "speaker_description": description,
        "language": language,
        "ref_text": ref_text,
        "expires_at": expires_at,
    }
    changes = {field: value for field, value in given.items() if value is not None}
    for field in clear or ():
        changes[_FIELDS[field]] = {} if field == "labels" else None
    if not changes and not label and not unlabel:
        raise ConfigError("say what to change: see --help")
    added = pairs(label)
    with client_of(url, api_key) as client:
        if added or unlabel:
            before = {} if "labels" in changes else client.get(name)["voice"]["labels"]
            changes["labels"] = _relabelled(before, added, unlabel or [])
        answer = client.change(name, changes)
    if as_json:
        style.print_json(answer)
    else:
        print_fields({**answer.pop("voice", {}), **answer})


def _relabelled(
    before: dict[str, str], added: dict[str, str], removed: list[str]
) -> dict[str, str]:
    # Keys are compared folded: the new spelling of one takes the place of the old.
    gone = {key.casefold() for key in (*removed, *added)}
    kept = {key: each for key, each in before.items() if key.casefold() not in gone}
    return {**kept, **added}


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="or ids")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    missing_ok: Annotated[
        bool, typer.Option("--missing-ok", help="a voice that is not there is no error")
    ] = False,
    jobs: Jobs = 2,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    directory: Directory = None,
    tenant: TenantName = None,
    as_json: style.Json = False,
) -> None:
    """Delete voices, with all that was made of them; waits until nothing is left.

    On a terminal it asks first. Status 4 if one is not there, unless --missing-ok is
    given.

    JSON: {"counts", "interrupted", "voices": [{"name", "outcome":
    "deleted|missing|failed|not_tried", "error"}]}.
    """
    from vllm_tts_cache.entrypoints.cli.voices.bulk import in_parallel

    chosen = list(dict.fromkeys(names))
    if not yes and sys.stdin.isatty():
        what = repr(chosen[0]) if len(chosen) == 1 else f"{len(chosen)} voices"
        typer.confirm(f"Delete {what} for good?", abort=True, err=True)
    with voices_of(url, api_key, directory, tenant, writes=True) as source:
        many = in_parallel(
            chosen,
            lambda name, stop: _delete(source, name, stop),
            name=str,
            title="deleting",
            num_jobs=jobs,
        )
    if not as_json:
        for each in many.outcomes:
            if each.outcome == "missing":
                style.note(f"{each.name}: there is no such voice")
    many.report("voices", as_json=as_json)
    style.leave(style.NOT_FOUND if many.counts.get("missing") and not missing_ok else 0)


def _delete(source: Voices, name: str, stop: "Stop") -> "Outcome":
    from vllm_tts_cache.entrypoints.cli.voices.bulk import Outcome, patiently

    try:
        patiently(lambda: source.delete(name), stop)
    except SpeakerNotFoundError:
        return Outcome(name=name, outcome="missing")
    except RouteMissingError:
        raise
    except ServerAnswerError as exc:
        if exc.status != _NOT_FOUND:
            raise
        return Outcome(name=name, outcome="missing")
    return Outcome(name=name, outcome="deleted")


COMMANDS = {
    "warm": (
        warm,
        examples(
            "vllm-tts-cache voices warm keeper",
            "vllm-tts-cache voices warm --all --jobs 8",
            "vllm-tts-cache voices warm --label team:news --json",
        ),
    ),
    "edit": (
        edit,
        examples(
            "vllm-tts-cache voices edit keeper --name Keeper --label team:news",
            "vllm-tts-cache voices edit keeper --clear ref-text",
            "vllm-tts-cache voices edit keeper --expires-at 2031-01-01T00:00:00Z",
        ),
    ),
    "rm": (
        rm,
        examples(
            "vllm-tts-cache voices rm keeper",
            "vllm-tts-cache voices rm --yes ann bob",
            "vllm-tts-cache voices rm ann --directory ~/.cache/vllm-omni/speakers",
        ),
    ),
}
