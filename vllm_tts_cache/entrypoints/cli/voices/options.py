"""The command line's options for what else is kept with a voice."""

import json
from typing import Annotated, Any

import typer

from vllm_tts_cache.errors import ConfigError

Aliases = Annotated[
    list[str] | None,
    typer.Option("--alias", metavar="NAME", help="another name; may be repeated"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="NAME=VALUE",
        help="how it speaks unless a request says so, as speed=0.9; may be repeated",
    ),
]


def extras_of(aliases: list[str] | None, settings: list[str] | None) -> dict[str, Any]:
    """Return what is given of them, by the names of the routes' fields.

    A setting is JSON, or a text. Raises: ConfigError.
    """
    parsed: dict[str, Any] = {}
    for each in settings or ():
        name, is_pair, value = each.partition("=")
        if not is_pair:
            raise ConfigError(f"--setting {each!r}: write it as NAME=VALUE")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    given = {"aliases": aliases, "settings": parsed}
    return {name: value for name, value in given.items() if value}
