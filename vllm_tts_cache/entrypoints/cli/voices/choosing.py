"""Which voices a command is about, and what their files are called."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vllm_tts_cache.entrypoints.cli.voices.source import Voices
from vllm_tts_cache.errors import ConfigError

# With what tells it from others a file's name has less than 255 bytes.
_MAX_NAME_BYTES = 200

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="or ids")]
All = Annotated[
    bool, typer.Option("--all", help="all voices, or all that --search finds")
]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A voice that a command is about.

    Attributes:
        name: What it is called in reports.
        ref: What it is asked for by: its id, if it was listed, as it may be renamed
            before its turn comes; else what was given.
    """

    name: str
    ref: str


def chosen_of(
    source: Voices, names: list[str] | None, all_: bool, query: dict[str, Any]
) -> list[Chosen]:
    """Return the voices that a command is about.

    Raises: ConfigError, RemoteError.
    """
    asks = all_ or any(query.values())
    if bool(names) == asks:
        raise ConfigError("give names, or --all, --search or --label")
    if names:
        return [Chosen(name, name) for name in dict.fromkeys(names)]
    # Stock's server lists no ids.
    listed = source.voices(**query)
    return [Chosen(each["name"], each.get("id") or each["name"]) for each in listed]


def file_names(chosen: Sequence[Chosen]) -> dict[Chosen, str]:
    """What the file of each is called, without an end: no two the same.

    That is its name as far as a file's can hold it; where those of several would be
    one, each has its id behind it, or a hash of the name where no id is known.
    """
    # Imported here: a listing does without.
    from vllm_tts_cache.catalogue.names import fold
    from vllm_tts_cache.store.archive_format import safe_name

    found = {each: safe_name(each.name, _MAX_NAME_BYTES) for each in chosen}
    plain = set(found)
    while True:
        # As file systems compare them that know no case.
        counts = Counter(map(fold, found.values()))
        meeting = {each for each in plain if counts[fold(found[each])] > 1}
        if not meeting:
            return found
        # What they are called now may be what another one is called.
        plain -= meeting
        found |= {each: f"{found[each]}-{_tag(each)}" for each in meeting}


def _tag(chosen: Chosen) -> str:
    if chosen.ref != chosen.name:
        return chosen.ref
    return hashlib.sha256(chosen.name.encode(errors="replace")).hexdigest()[:32]
