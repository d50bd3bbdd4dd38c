"""``vllm-tts-cache stage-config``: where our deploy files are."""

from typing import Annotated

import typer

from vllm_tts_cache.entrypoints.cli.style import (
    Json,
    examples,
    new_app,
    print_json,
)
from vllm_tts_cache.stage_configs import FOLDER

app = new_app()


def _names() -> list[str]:
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.yaml"))


def _known(name: str) -> str:
    if name not in _names():
        raise typer.BadParameter(f"{name!r} is none of {', '.join(_names())}")
    return name


@app.command(
    epilog=examples(
        "# one KV prefix per voice: a second text of a voice prefills only that text",
        "vllm serve fishaudio/s2-pro --omni \\",
        '  --deploy-config "$(vllm-tts-cache stage-config fish-speech)"',
    )
)
def stage_config(
    name: Annotated[
        str,
        typer.Argument(
            callback=_known, autocompletion=_names, help=", ".join(_names())
        ),
    ],
    as_json: Json = False,
) -> None:
    """Print the path of a deploy file of ours, for `vllm serve --deploy-config`.

    What each one changes against the host's, and why, is written in it.
    """
    path = FOLDER / f"{name.replace('-', '_')}.yaml"
    if as_json:
        print_json({"path": str(path)})
    else:
        # Alone on its line, so that a shell can take it.
        typer.echo(path)
