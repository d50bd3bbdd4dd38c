"""Voices that are to be registered: one of the command line, or all of a manifest."""

import csv
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import check_size, decode_clips
from vllm_tts_cache.catalogue import records
from vllm_tts_cache.config import expanded
from vllm_tts_cache.entrypoints.http.forms import parse_labels, parse_object, parse_time
from vllm_tts_cache.logs import utf8

COLUMNS = (
    *("name", "audio", "consent", "ref_text", "language", "labels"),
    *("aliases", "settings", "description", "expires_at"),
)
_LABEL_COLUMN = "label:"
_SEPARATOR = ";"
_NEEDED = ("name", "audio")
_SHOWN_PROBLEMS = 20


class ManifestError(errors.ConfigError):
    """A manifest, or a voice of the command line, is wrong; nothing was sent.

    Attributes:
        problems: Row (the heading is row 1; None for the whole file) and what is wrong.
    """

    def __init__(self, what: str, problems: list[tuple[int | None, str]]):
        lines = [
            f"row {row}: {reason}" if row else reason
            for row, reason in problems[:_SHOWN_PROBLEMS]
        ]
        if more := len(problems) - len(lines):
            lines.append(f"and {more} more")
        super().__init__(f"{what}: nothing was sent: {'; '.join(lines)}")
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVoice:
    """A voice that is to be registered.

    Attributes:
        speaker: The voice without its audio.
        clips: One or several; for several, ``ref_text`` has a line for each.
        row: The voice's row of the manifest; None for a voice of the command line.
    """

    speaker: records.NewSpeaker
    clips: tuple[Path, ...]
    row: int | None = None

    @classmethod
    def checked(
        cls, clips: tuple[Path, ...], consent: str, *, row: int | None, **given: Any
    ) -> "NewVoice":
        """Refuse what a server would refuse, except for what is in the clips.

        The clips must exist; the server decodes them. The fields that are ``given`` are
        `NewSpeaker`'s.

        Raises: SpeakerRequestError.
        """
        if not consent:
            reason = (
                "it is empty; a voice needs its speaker's consent: give --consent"
                f"{'' if row is None else ', or the column consent'}"
            )
            raise errors.InvalidSpeakerError("consent", reason)
        records.check_is_to_come(given["expires_at"], time.time())
        speaker = records.NewSpeaker(
            consent=consent,
            original_filename=utf8(clips[0].name),
            audio_sha256="of clips that are read later",
            num_samples=len(clips),
            sample_rate_hz=1,
            clip_starts=tuple(range(len(clips))),
            **given,
        )
        # One request sends all clips.
        check_size(sum(map(_num_bytes, clips)))
        return cls(speaker=speaker, clips=clips, row=row)

    def __str__(self) -> str:
        return self.speaker.name

    def form(self, *, precompute: bool, check: bool) -> dict[str, str]:
        """Return the fields of the voice's registration."""
        given = {**self._fields(), "precompute": precompute, "check": check}
        fields = {name: of for name, of in given.items() if of not in (None, {})}
        fields |= self.speaker.extras
        return {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in fields.items()
        }

    def differences(
        self, voice: Mapping[str, Any], clips: Sequence[bytes]
    ) -> list[str]:
        """Return the fields in which a registered voice differs, by the server's names.

        The clips are decoded: the same samples in another file are the same clip.
        """
        ours = {**self._fields(), **self.speaker.extras}
        if (expires_at := self.speaker.expires_at) is not None:
            ours["expires_at"] = int(expires_at)
        theirs = {"labels": {}, **voice}
        found = [name for name in ours if ours[name] != theirs.get(name)]
        try:
            sha = decode_clips(clips).audio.audio_sha256
        except errors.InvalidAudioError:
            sha = None  # the server reports what is wrong with the clip
        return found if sha == voice.get("audio_sha256") else [*found, "audio"]

    def _fields(self) -> dict[str, Any]:
        its = self.speaker
        return {
            "name": its.name,
            "consent": its.consent,
            "ref_text": its.ref_text,
            "language": its.language,
            "labels": dict(its.labels),
            "speaker_description": its.description,
            "expires_at": its.expires_at,
        }


def _num_bytes(clip: Path) -> int:
    """Return a clip's size in bytes. Raises: InvalidAudioError if it cannot be sent."""
    try:
        num_bytes = clip.stat().st_size if clip.is_file() else -1
    except (OSError, ValueError) as exc:
        raise errors.InvalidAudioError(f"{clip}: {exc}") from exc
    if num_bytes <= 0:
        raise errors.InvalidAudioError(f"{clip}: there is no such file, or it is empty")
    return num_bytes


def voice_of_arguments(
    name: str | None,
    clips: list[Path] | None,
    consent: str,
    *,
    ref_texts: Sequence[str],
    expires_at: str | None,
    **given: Any,
) -> NewVoice:
    """Return the voice that a command line describes.

    Raises: ConfigError: Name or clip is missing; ManifestError: another field is wrong.
    """
    if name is None or not clips:
        raise errors.ConfigError("give a NAME and a CLIP, or --manifest FILE.csv")
    try:
        return NewVoice.checked(
            tuple(clips),
            consent,
            row=None,
            name=name.strip(),
            expires_at=parse_time(expires_at),
            ref_text=records.joined_transcript(ref_texts, len(clips)),
            **given,
        )
    except errors.SpeakerRequestError as exc:
        raise ManifestError(name, [(None, str(exc))]) from exc


def read_manifest(path: Path, *, consent: str | None) -> list[NewVoice]:
    """Read all of a CSV file in UTF-8, and check each row and its clips.

    The paths of clips are relative to the folder of the file. Rows that have no consent
    take ``consent``.

    Raises: ManifestError if something is wrong; it lists all problems.
    """
    problems: list[tuple[int | None, str]] = []
    voices: list[NewVoice] = []
    first: dict[str, int] = {}
    try:
        for row, cells in _rows(path):
            try:
                voice = _voice(cells, path.parent, row, consent)
            except (errors.SpeakerRequestError, errors.ConfigError, ValueError) as exc:
                problems.append((row, str(exc)))
                continue
            if (before := first.setdefault(voice.speaker.name_key, row)) != row:
                problems.append((row, f"{str(voice)!r} is in row {before} as well"))
            voices.append(voice)
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        problems.append((None, f"it cannot be read: {exc}"))
    if not voices and not problems:
        problems.append((None, "it has no rows"))
    if problems:
        raise ManifestError(str(path), problems)
    return voices


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield rows with their numbers: line numbers, if each row is one line.

    Raises: OSError, UnicodeDecodeError, csv.Error.
    """
    # Spreadsheets begin UTF-8 with a byte order mark.
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        headings = [heading.strip() for heading in next(rows, [])]
        _check_headings(headings)
        for number, cells in enumerate(rows, start=2):
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) > len(headings):
                found = f"row {number} has {len(cells)} cells, the heading {headings!r}"
                raise csv.Error(f"{found}; put a cell with commas into quotes")
            padded = [*cells, *[""] * (len(headings) - len(cells))]
            yield number, dict(zip(headings, padded, strict=True))


def _check_headings(headings: list[str]) -> None:
    given = set(headings)
    unknown = {h for h in given if not h.startswith(_LABEL_COLUMN)} - set(COLUMNS)
    if unknown or not given.issuperset(_NEEDED) or len(given) < len(headings):
        raise csv.Error(
            f"its heading is {headings!r}; columns are {', '.join(COLUMNS)} and "
            f"label:KEY ({' and '.join(_NEEDED)} are needed), each once"
        )


def _voice(
    cells: Mapping[str, str], folder: Path, row: int, consent: str | None
) -> NewVoice:
    def cell(column: str) -> str | None:
        return cells.get(column, "").strip() or None

    labels = parse_labels(cell("labels"))
    for column, value in cells.items():
        if column.startswith(_LABEL_COLUMN) and value.strip():
            labels[column.removeprefix(_LABEL_COLUMN).strip()] = value.strip()
    aliases = [each.strip() for each in (cell("aliases") or "").split(_SEPARATOR)]
    settings = parse_object("settings", cell("settings"))
    extras = {"aliases": list(filter(None, aliases)), "settings": settings}
    if (audio := cell("audio")) is None:
        raise errors.InvalidAudioError("the column audio is empty")
    return NewVoice.checked(
        _clips(folder, audio),
        cell("consent") or (consent or "").strip(),
        row=row,
        name=cell("name") or "",
        ref_text=cell("ref_text"),
        language=cell("language"),
        labels=labels,
        extras={name: value for name, value in extras.items() if value},
        description=cell("description"),
        expires_at=parse_time(cell("expires_at")),
    )


def _clips(folder: Path, audio: str) -> tuple[Path, ...]:
    """Return the files of a cell: one, whose name may have a ``;``, or several."""
    whole = folder / expanded(Path(audio))
    if _SEPARATOR not in audio or whole.is_file():
        return (whole,)
    names = [name.strip() for name in audio.split(_SEPARATOR)]
    if not all(names):
        reason = f"the column audio has nothing on one side of a {_SEPARATOR!r}"
        raise errors.InvalidAudioError(reason)
    return tuple(folder / expanded(Path(name)) for name in names)
