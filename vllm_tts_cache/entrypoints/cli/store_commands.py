"""``vllm-tts-cache gc`` and ``verify``: the voices of a stopped server.

`gc` does at once what a server does at its start and in the background. `verify` reads
every stored voice and reports what is wrong.
"""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli import common

if TYPE_CHECKING:
    from vllm_tts_cache.store.speaker_store import SpeakerStore

_EXPIRED_AT_ONCE = 100

gc_app = common.new_app()
verify_app = common.new_app()


@gc_app.command(
    epilog=common.examples(
        "vllm-tts-cache gc --dry-run",
        "vllm-tts-cache gc --directory /srv/speakers --json",
    )
)
def gc(
    directory: common.Directory = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what is to be done; write nothing")
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Tidy the directory of a stopped server (SPEAKER_SAMPLES_DIR, or --directory).

    Deletes expired voices, finishes what killed processes began, removes files that no
    voice has and what is over the budgets, and verifies all that is left.
    Refused (2) while a server has it open; status 1 if something stays wrong.

    JSON: {"directory", "dry_run", "expired": [names], "recovered": [what was done],
    "over_budget_bytes": {"inline audio": 0, ...}, "evicted_files", "problems": [...]}.
    With --dry-run, "problems" has what is wrong now.
    """
    from vllm_tts_cache.entrypoints.cli.voices.directory import open_directory

    with open_directory(directory, writes=not dry_run) as opened:
        store = opened.store
        found: dict[str, Any] = {
            "directory": str(store.directory),
            "dry_run": dry_run,
            "expired": store.expired_names(),
            "recovered": [],
            "over_budget_bytes": _excess(store),
            "evicted_files": 0,
        }
        if not dry_run:
            found |= _tidied(store)
        found["problems"] = store.verify()
    if as_json:
        common.print_json(found)
    else:
        _print(found)
    common.leave(common.FAILED if found["problems"] and not dry_run else 0)


def _tidied(store: "SpeakerStore") -> dict[str, Any]:
    while over := store.registrations.delete_expired(_EXPIRED_AT_ONCE):
        for deletion in over:
            store.remove_files(deletion)
    tidied = {
        "recovered": store.repair(),
        "over_budget_bytes": _excess(store),
        "evicted_files": store.writer.trim(),
    }
    store.sweep()  # in a bucket only the rows of objects are deleted by now
    return tidied


def _excess(store: "SpeakerStore") -> dict[str, int]:
    return {
        f"{segment.value} {'audio' if is_audio else 'encodings'}": num_bytes
        for (segment, is_audio), num_bytes in store.writer.excess().items()
    }


def _print(found: dict[str, Any]) -> None:
    will = "would " if found["dry_run"] else ""
    for name in found["expired"]:
        common.say(f"{will}delete {name}: it has expired")
    for line in found["recovered"]:
        common.say(line)
    for what, num_bytes in found["over_budget_bytes"].items():
        common.say(f"{will}evict {num_bytes} bytes of {what}, which is over its budget")
    if num_files := found["evicted_files"]:
        common.say(f"evicted {num_files} files")
    for line in found["problems"]:
        common.say(f"{'to look into' if found['dry_run'] else 'still wrong'}: {line}")
    kinds = ("expired", "recovered", "over_budget_bytes", "problems")
    if not any(found[kind] for kind in kinds):
        common.say(f"{found['directory']}: nothing to do")


@verify_app.command(
    epilog=common.examples("vllm-tts-cache verify", "vllm-tts-cache verify --json")
)
def verify(
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="first finish what killed processes began, as a server's start does, "
            "remove damaged encodings, which are made again, and from a bucket what "
            "the catalogue does not know, and restore its damaged audio from the "
            "copies of this machine",
        ),
    ] = False,
    as_json: common.Json = False,
) -> None:
    """Check the stored voices under SPEAKER_SAMPLES_DIR.

    Reads the catalogue, the reference audio and the encodings, and prints one line for
    each thing that is wrong. Without --repair it writes nothing, and servers may go on
    using the directory. Status: 0 nothing is wrong, 1 something is, 2 no server has
    stored voices there.
    """
    from vllm_tts_cache.store.opening import open_existing

    with closing(open_existing(load_settings())) as store:
        repaired = store.repair() if repair else []
        problems = store.verify()
    directory = str(store.directory)
    if as_json:
        found = {"directory": directory, "repaired": repaired, "problems": problems}
        common.print_json(found)
    else:
        done = [f"repaired: {line}" for line in repaired]
        for line in (*done, *(problems or [f"{directory}: nothing wrong"])):
            common.say(line)
    common.leave(common.FAILED if problems else 0)
