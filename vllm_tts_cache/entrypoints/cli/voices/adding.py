"""``voices add``: one voice, or all of a manifest; and ``voices check``."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tts_cache.catalogue.names import fold
from vllm_tts_cache.entrypoints.cli import common
from vllm_tts_cache.entrypoints.cli.voices import bulk
from vllm_tts_cache.errors import ConfigError

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient
    from vllm_tts_cache.entrypoints.cli.voices.manifest import NewVoice

# Fields of an answer that are reported.
_REPORTED = ("warnings", "quality", "note")
_RESUME = "Run the same command again to go on: what the server has is not sent again."


def add(
    name: Annotated[str | None, typer.Argument()] = None,
    clips: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CLIP", help="several, on models that take them for one voice"
        ),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="many voices: a CSV file with the columns name, audio (a path from "
            "where the manifest is, or several with ; between), consent, ref_text, "
            "language, labels (JSON) or label:KEY, aliases (with ; between), "
            "settings (JSON), description, expires_at",
        ),
    ] = None,
    consent: Annotated[
        str | None,
        typer.Option(
            help="a reference to the speaker's consent, or the id of a recording; with "
            "a manifest, of rows that have none"
        ),
    ] = None,
    ref_text: Annotated[
        list[str] | None,
        typer.Option(
            help="what is said in the clip; of several repeated, once for each"
        ),
    ] = None,
    language: common.Language = None,
    label: common.Labels = None,
    alias: common.Aliases = None,
    setting: common.VoiceSettings = None,
    description: common.Description = None,
    expires_at: common.ExpiresAt = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="register over a voice that has the name and differs"
        ),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="until it is encoded, and can speak at once")
    ] = False,
    precompute: Annotated[
        bool, typer.Option(help="encode it in the background")
    ] = True,
    jobs: common.Jobs = 4,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    as_json: common.Json = False,
) -> None:
    """Register a voice by a clip or several, or many voices by a manifest.

    All of a manifest is checked before anything is sent. A voice that the server has
    with the same clip and the same texts is left alone, so a run that was cut short
    (Ctrl-C: 130) goes on when it is run again; one that differs fails unless --replace
    is given. A busy server (503) is waited for.

    JSON: {"counts": {"added": 2, ...}, "interrupted": false, "voices": [{"name", "row",
    "outcome": "added|replaced|unchanged|failed|not_tried", "id", "warnings", "quality",
    "error", "cache_status"}]}; of a manifest that is wrong {"problems": [{"row",
    "error"}]}.
    """
    from vllm_tts_cache.entrypoints.cli.voices import manifest as manifests

    given: dict[str, Any] = {
        "ref_texts": ref_text or (),
        "language": language,
        "labels": common.pairs(label),
        "extras": common.extras_of(alias, setting),
        "description": description,
        "expires_at": expires_at,
    }
    try:
        if manifest is None:
            voices = [manifests.voice_of_arguments(name, clips, consent or "", **given)]
        elif name or any(given.values()):
            raise ConfigError(
                "--manifest: the file has the fields of each voice; only --consent "
                "can be given beside it"
            )
        else:
            voices = manifests.read_manifest(manifest, consent=consent)
    except manifests.ManifestError as exc:
        if as_json:
            shown = [{"row": row, "error": reason} for row, reason in exc.problems]
            common.print_json({"problems": shown})
        raise
    with common.client_of(url, api_key) as client:
        many = bulk.in_parallel(
            voices,
            partial(_add, client, replaces=replace, precomputes=precompute, waits=wait),
            title="adding voices",
            num_jobs=jobs,
            details=_row_of,
        )
    if not as_json:
        for each in many.outcomes:
            quality = each.details.get("quality") or {}
            warnings = each.details.get("warnings", ())
            for said in (*warnings, *quality.get("reasons", ())):
                common.note(f"{each.name}: {said.get('message')}")
    many.report("voices", as_json=as_json, hint=_RESUME)


def _row_of(voice: "NewVoice") -> dict[str, Any]:
    return {} if voice.row is None else {"row": voice.row}


def _add(
    client: "VoicesClient",
    voice: "NewVoice",
    stop: bulk.Stop,
    *,
    replaces: bool,
    precomputes: bool,
    waits: bool,
) -> bulk.Outcome:
    """Register a voice, unless the server has the same one.

    Raises: RemoteError, StoppedError, OSError; ConfigError if the server's differs.
    """
    is_alone = voice.row is None  # it comes from the command line, not a manifest
    clips = [(clip.name, clip.read_bytes()) for clip in voice.clips]
    name = voice.speaker.name
    there = bulk.patiently(client.find, name, stop=stop)
    differing = list[str]()
    if there is not None:
        differing = voice.differences(there, [data for _, data in clips])
        if fold(there["name"]) != voice.speaker.name_key:
            raise ConfigError(f"is an alias of {there['name']!r}; choose another name")
    details: dict[str, Any] = _row_of(voice)
    if there is not None and not differing and not there.get("audio_lost"):
        outcome, details["id"] = "unchanged", there.get("id")
    elif differing and not replaces:
        raise ConfigError(
            f"is registered with another {' and '.join(differing)}; --replace "
            "registers it over"
        )
    else:
        outcome = "added" if there is None else "replaced"
        form = voice.form(
            # With --wait a single voice is encoded by the call below, at once.
            precompute=precomputes and not (waits and is_alone),
            # A check takes the server tens of ms; `voices check` checks many clips.
            check=is_alone,
        )
        answer = bulk.written_once(client.add, form, clips, stop=stop)
        details["id"] = answer.get("id")
        details |= {key: answer[key] for key in _REPORTED if key in answer}
    if waits:
        answer = bulk.made(client, name, stop, urgent=is_alone)
        details["cache_status"] = answer.get("cache_status")
    return bulk.Outcome(name, outcome, details=details)


def check(
    clips: Annotated[list[Path], typer.Argument(metavar="CLIP")],
    ref_text: common.RefText = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="on this machine, without a model's limits"),
    ] = False,
    jobs: common.Jobs = 2,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    as_json: common.Json = False,
) -> None:
    """Say what clips are worth as references; nothing is registered.

    Status 1 if one is poor, or no clip. JSON: {"clips": [{"name", "outcome":
    "good|fair|poor|failed", "error", and what `POST /v1/audio/voices/check` answers}]}.
    """

    def one(path: Path, stop: bulk.Stop) -> bulk.Outcome:
        data = path.read_bytes()
        found = bulk.patiently(judge, path.name, data, ref_text, stop=stop)
        return bulk.Outcome(str(path), str(found.get("verdict")), details=found)

    with common.client_of(url, api_key) as client:
        judge = _judge_here if offline else client.check
        many = bulk.in_parallel(clips, one, title="checking", num_jobs=jobs)
    if not as_json:
        for each in many.outcomes:
            if "verdict" not in each.details:
                continue
            seconds = each.details.get("duration_seconds")
            length = f" ({seconds:.1f} s)" if isinstance(seconds, float | int) else ""
            common.say(f"{each.name}: {each.outcome}{length}")
            for reason in each.details.get("reasons") or ():
                common.say(f"  {reason.get('message')}")
    many.report("clips", as_json=as_json)
    common.leave(common.FAILED if many.counts.get("poor") else 0)


def _judge_here(_: str, data: bytes, ref_text: str | None) -> dict[str, Any]:
    """Return what a server answers about a clip, without a model's limits."""
    from vllm_tts_cache.audio.decode import decode
    from vllm_tts_cache.audio.quality import check_clip
    from vllm_tts_cache.catalogue.records import check_text

    check_text("ref_text", ref_text)
    decoded = decode(data)
    found = check_clip(decoded.audio, ref_text=ref_text, warnings=decoded.warnings)
    return found.to_dict()
