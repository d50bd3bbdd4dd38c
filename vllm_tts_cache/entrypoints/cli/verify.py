"""``vllm-tts-cache verify``: read every stored voice and say what is wrong."""

from typing import Annotated

import typer

from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli.style import (
    FAILED,
    Json,
    examples,
    leave,
    new_app,
    print_json,
    say,
)

app = new_app()


@app.command(epilog=examples("vllm-tts-cache verify", "vllm-tts-cache verify --json"))
def verify(
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="first finish what killed processes began, as a server's start does, "
            "and remove from a bucket what the catalogue does not know",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the stored voices under SPEAKER_SAMPLES_DIR.

    Reads the catalogue, the reference audio and the encodings, and prints one line for
    each thing that is wrong. Nothing is written, and servers may go on using the
    directory. Status: 0 nothing is wrong, 1 something is, 2 there is nothing to look
    at.
    """
    from vllm_tts_cache.store.opening import open_existing

    store = open_existing(load_settings())
    try:
        repaired = [*store.recover(), *store.remove_strays()] if repair else []
        problems = store.verify()
    finally:
        store.close()
    if as_json:
        print_json(
            {
                "directory": str(store.directory),
                "repaired": repaired,
                "problems": problems,
            }
        )
    else:
        nothing = [] if problems else [f"{store.directory}: nothing wrong"]
        done = [f"repaired: {line}" for line in repaired]
        for line in (*done, *problems, *nothing):
            say(line)
    leave(FAILED if problems else 0)
