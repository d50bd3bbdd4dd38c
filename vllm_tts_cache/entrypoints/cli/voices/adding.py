"""``voices add``: one voice, or all of a manifest."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tts_cache.entrypoints.cli import style
from vllm_tts_cache.entrypoints.cli.style import examples, pairs
from vllm_tts_cache.entrypoints.cli.voices.source import (
    DEFAULT_URL,
    ApiKey,
    Jobs,
    Labels,
    Url,
    client_of,
)
from vllm_tts_cache.errors import ConfigError, SpeakerRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_tts_cache.client import VoicesClient
    from vllm_tts_cache.entrypoints.cli.voices.bulk import Outcome, Stop
    from vllm_tts_cache.entrypoints.cli.voices.manifest import NewVoice

# Of an answer, what may be worth knowing.
_SAID = ("warnings", "quality", "note")
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
            "language, labels (JSON) or label:KEY, description, expires_at",
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
    language: Annotated[str | None, typer.Option(help="as de or pt-BR")] = None,
    label: Labels = None,
    description: Annotated[str | None, typer.Option(help="free text")] = None,
    expires_at: Annotated[
        str | None, typer.Option(help="ISO 8601, or Unix seconds; deleted then")
    ] = None,
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
    jobs: Jobs = 4,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: style.Json = False,
) -> None:
    """Register a voice by a clip or several, or many voices by a manifest.

    All of a manifest is looked at before anything is sent. A voice that the server has
    with the same clip and the same texts is left alone, so a run that was cut short
    (Ctrl-C: 130) goes on when it is run again; one that differs fails unless --replace
    is given. A busy server (503) is waited for.

    JSON: {"counts": {"added": 2, ...}, "interrupted": false, "voices": [{"name", "row",
    "outcome": "added|replaced|unchanged|failed|not_tried", "id", "warnings", "quality",
    "error", "cache_status"}]}; of a manifest that is wrong {"problems": [{"row",
    "error"}]}.
    """
    from vllm_tts_cache.entrypoints.cli.voices.manifest import (
        ManifestError,
        read_manifest,
    )

    try:
        if manifest is not None:
            _check_alone(name, ref_text, language, label, description, expires_at)
            voices = read_manifest(manifest, consent=consent)
        else:
            voices = [
                _of_arguments(
                    name,
                    clips or [],
                    consent=consent or "",
                    ref_texts=ref_text or [],
                    language=language,
                    labels=pairs(label),
                    description=description,
                    expires_at=expires_at,
                )
            ]
    except ManifestError as exc:
        if as_json:
            shown = [{"row": row, "error": reason} for row, reason in exc.problems]
            style.print_json({"problems": shown})
        raise
    _add_all(
        voices,
        client_of(url, api_key),
        _Adding(replaces=replace, precomputes=precompute, waits=wait),
        num_jobs=jobs,
        as_json=as_json,
    )


class _Adding:
    """How voices are added.

    Args:
        replaces: Whether what has the name and differs is registered over.
        precomputes: Whether it is encoded in the background.
        waits: Whether it is encoded before it counts as done.
    """

    def __init__(self, *, replaces: bool, precomputes: bool, waits: bool):
        self._replaces = replaces
        self._precomputes = precomputes
        self._waits = waits

    def add(self, voice: "NewVoice", client: "VoicesClient", stop: "Stop") -> "Outcome":
        """Add one, unless the server has it.

        Raises: RemoteError, StoppedError, OSError; ConfigError if it is there and
            differs.
        """
        from vllm_tts_cache.entrypoints.cli.voices.bulk import (
            Outcome,
            made_in_turn,
            patiently,
        )

        is_alone = voice.row is None  # and not one of a manifest's
        clips = [(clip.name, clip.read_bytes()) for clip in voice.clips]
        there = patiently(lambda: client.find(voice.name), stop)
        differing, is_there = list[str](), False
        if there is not None:
            differing = voice.differences(there, [data for _, data in clips])
            is_there = not (differing or there.get("audio_lost"))
        told: dict[str, Any] = _row_of(voice)
        if there is not None and is_there:
            outcome, told["id"] = "unchanged", there.get("id")
        elif differing and not self._replaces:
            raise ConfigError(
                f"is registered with another {' and '.join(differing)}; --replace "
                "registers it over"
            )
        else:
            outcome = "added" if there is None else "replaced"
            form = voice.form(
                # A single one that is waited for is encoded by that call, at once.
                precompute=self._precomputes and not (self._waits and is_alone),
                # It takes the server tens of milliseconds: many are asked about by
                # `voices check`.
                check=is_alone,
            )
            answer = patiently(lambda: client.add(form, clips), stop)
            told["id"] = answer.get("id")
            told |= {key: answer[key] for key in _SAID if key in answer}
        if self._waits:
            if is_alone:
                answer = patiently(lambda: client.precompute(voice.name), stop)
            else:
                answer = made_in_turn(client, voice.name, stop)
            told["cache_status"] = answer.get("cache_status")
        return Outcome(name=voice.name, outcome=outcome, details=told)


def _add_all(
    voices: "list[NewVoice]",
    client: "VoicesClient",
    adding: _Adding,
    *,
    num_jobs: int,
    as_json: bool,
) -> None:
    from vllm_tts_cache.entrypoints.cli.voices.bulk import in_parallel

    with client:
        many = in_parallel(
            voices,
            lambda voice, stop: adding.add(voice, client, stop),
            name=lambda voice: voice.name,
            title="adding voices",
            num_jobs=num_jobs,
            details=_row_of,
        )
    if not as_json:
        for each in many.outcomes:
            quality = each.details.get("quality") or {}
            for said in (
                *each.details.get("warnings", ()),
                *quality.get("reasons", ()),
            ):
                style.note(f"{each.name}: {said.get('message')}")
    many.report("voices", as_json=as_json, hint=_RESUME)


def _row_of(voice: "NewVoice") -> dict[str, Any]:
    return {} if voice.row is None else {"row": voice.row}


def _check_alone(*given: object) -> None:
    if any(given):
        raise ConfigError(
            "--manifest: what is said of a voice stands in it; only --consent "
            "can be given for all"
        )


def _of_arguments(
    name: str | None,
    clips: list[Path],
    *,
    ref_texts: list[str],
    expires_at: str | None,
    **fields: Any,
) -> "NewVoice":
    from vllm_tts_cache.catalogue.details import joined
    from vllm_tts_cache.entrypoints.cli.voices.manifest import ManifestError, NewVoice
    from vllm_tts_cache.entrypoints.http.forms import parse_time

    if name is None or not clips:
        raise ConfigError("give a NAME and a CLIP, or --manifest FILE.csv")
    try:
        end = parse_time(expires_at)
        voice = NewVoice(
            name=name.strip(),
            clips=tuple(clips),
            ref_text=joined(ref_texts, len(clips)),
            expires_at=end,
            **fields,
        )
        voice.check()
    except SpeakerRequestError as exc:
        raise ManifestError(name, [(None, str(exc))]) from exc
    return voice


def check(
    clips: Annotated[list[Path], typer.Argument(metavar="CLIP")],
    ref_text: Annotated[
        str | None, typer.Option(help="what is said in the clip")
    ] = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="here, without a server and a model's limits"),
    ] = False,
    jobs: Jobs = 2,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: style.Json = False,
) -> None:
    """Say what clips are worth as references; nothing is registered.

    Status 1 if one is poor, or no clip. JSON: {"clips": [{"name", "outcome":
    "good|fair|poor|failed", "error", and what `POST /v1/audio/voices/check` answers}]}.
    """
    from vllm_tts_cache.entrypoints.cli.voices.bulk import (
        Outcome,
        Stop,
        in_parallel,
        patiently,
    )

    def one(path: Path, stop: Stop) -> Outcome:
        data = path.read_bytes()
        found = patiently(lambda: judge(path.name, data, ref_text), stop)
        verdict = str(found.get("verdict"))
        return Outcome(name=str(path), outcome=verdict, details=found)

    with client_of(url, api_key) as client:
        judge = _judge_here() if offline else client.check
        many = in_parallel(clips, one, name=str, title="checking", num_jobs=jobs)
    if not as_json:
        for each in many.outcomes:
            if "verdict" in each.details:
                _print_verdict(each)
    many.report("clips", as_json=as_json)
    style.leave(style.FAILED if many.counts.get("poor") else 0)


def _judge_here() -> "Callable[[str, bytes, str | None], dict[str, Any]]":
    """What a server says of a clip, told by this process, which knows no model."""
    from vllm_tts_cache.audio.decode import decode
    from vllm_tts_cache.audio.quality import ClipChecker
    from vllm_tts_cache.catalogue.records import check_text

    checker = ClipChecker()

    def judge(_: str, data: bytes, ref_text: str | None) -> dict[str, Any]:
        check_text("ref_text", ref_text)
        decoded = decode(data)
        found = checker.check(
            decoded.audio, ref_text=ref_text, warnings=decoded.warnings
        )
        return found.to_dict()

    return judge


def _print_verdict(outcome: "Outcome") -> None:
    seconds = outcome.details.get("duration_seconds")
    length = f" ({seconds:.1f} s)" if isinstance(seconds, float | int) else ""
    style.say(f"{outcome.name}: {outcome.outcome}{length}")
    for reason in outcome.details.get("reasons") or ():
        style.say(f"  {reason.get('message')}")


COMMANDS = {
    "add": (
        add,
        examples(
            "vllm-tts-cache voices add keeper clip.flac --consent 'signed 2026' \\",
            "  --ref-text 'What is said in the clip.' --language en --label team:news",
            "# of several clips, on a model that takes them",
            "vllm-tts-cache voices add keeper a.wav b.wav --consent 'signed 2026' \\",
            "  --ref-text 'What is said in a.' --ref-text 'What is said in b.'",
            "# many: shows a bar; run it again to go on after Ctrl-C",
            "vllm-tts-cache voices add --manifest voices.csv --jobs 8 --wait",
            "# why some failed",
            "vllm-tts-cache voices add --manifest voices.csv --json \\",
            "  | jq '.voices[] | select(.outcome == \"failed\")'",
        ),
    ),
    "check": (
        check,
        examples(
            "vllm-tts-cache voices check *.wav",
            "vllm-tts-cache voices check *.wav --offline",
            "vllm-tts-cache voices check clip.wav --ref-text 'What is said in it.'",
        ),
    ),
}
