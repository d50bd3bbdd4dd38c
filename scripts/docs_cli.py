"""The page of the documentation site that the command line makes of itself."""

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from vllm_tts_cache.entrypoints.cli import app, common

# What begins a paragraph that is shown as it stands.
_EXAMPLES, _JSON = "Examples:", "JSON: "


def commands_page() -> str:
    """Every command with what its ``--help`` says."""
    lines = [
        "# Command line, every option",
        "",
        "Made of what each command's `--help` says. How they are used is told in",
        "[Command line](../command-line.md).",
        "",
        *_statuses(),
    ]
    root = get_command(app)
    for context in _contexts(typer.Context(root, info_name="vllm-tts-cache")):
        lines += _command(context)
    return "\n".join(lines)


def _contexts(context: typer.Context) -> Iterator[typer.Context]:
    """The command and all below it."""
    yield context
    group = context.command
    if isinstance(group, TyperGroup):
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None, name
            yield from _contexts(typer.Context(command, info_name=name, parent=context))


def _command(context: typer.Context) -> Iterator[str]:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield from (f"## {context.command_path}", "", "```text", usage, "```", "")
    for paragraph in (command.help or "").replace("\b", "").split("\n\n"):
        yield from _paragraph(" ".join(paragraph.split()))
    rows = [_row(context, parameter) for parameter in command.get_params(context)]
    yield from ("| | |", "| --- | --- |", *filter(None, rows), "")
    _, is_told, told = (command.epilog or "").partition(_EXAMPLES)
    if is_told:
        shown = [line.strip() for line in told.splitlines() if line.strip()]
        yield from ("```sh", *_indented(shown), "```", "")


def _paragraph(text: str) -> Iterator[str]:
    if text.startswith(_JSON):
        text = f"JSON: `{text.removeprefix(_JSON)}`"
    yield from (text.replace("<", "&lt;"), "")


def _indented(lines: list[str]) -> Iterator[str]:
    """A line that goes on in the next one shows that."""
    goes_on = False
    for line in lines:
        yield f"  {line}" if goes_on else line
        goes_on = line.endswith("\\")


def _row(context: typer.Context, parameter: Any) -> str:
    if (record := parameter.get_help_record(context)) is None:
        return ""
    names, told = record
    cells = f"`{names}`", told.replace("<", "&lt;")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _statuses() -> Iterator[str]:
    """The exit statuses, which are the same of all commands."""
    _, _, told = common.STATUSES.partition("Exit status:")
    yield from ("| exit status | |", "| --- | --- |")
    for line in filter(None, map(str.strip, told.splitlines())):
        number, _, text = line.partition(" ")
        yield f"| {number} | {text.strip()} |"
    yield ""
