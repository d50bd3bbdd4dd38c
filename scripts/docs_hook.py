"""Pages of the documentation site that are made of the code when it is built."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the checkout's own code, wherever it is built

Json = dict[str, Any]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are in no file."""
    from scripts.docs_cli import commands_page

    pages = {
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "changes.md": (ROOT / "CHANGELOG.md").read_text(),
        "families/index.md": families_page(),
        "reference/http-schema.md": http_page(),
        "reference/commands.md": commands_page(),
    }
    readmes = sorted((ROOT / "vllm_tts_cache" / "families").glob("*/README.md"))
    families = {f"families/{each.parent.name}.md": each.read_text() for each in readmes}
    pages |= families
    models = next(entry for entry in config.nav if "Models" in entry)
    models["Models"] = ["families/index.md", *families]
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead to the site's pages of files that a reader of the repository finds there."""
    return markdown.replace("](../../CHANGELOG.md)", "](../changes.md)").replace(
        "](docs/", "]("
    )


def families_page() -> str:
    """The support table, and where each family's page is."""
    from scripts.support_table import support_table
    from vllm_tts_cache.speaker.family import families

    command = Path(sys.executable).with_name("vllm-tts-cache")
    table = subprocess.run(
        [command, "families", "--markdown"], check=True, capture_output=True, text=True
    )
    folder = ROOT / "vllm_tts_cache" / "families"
    pages = {readme.parent.name for readme in folder.glob("*/README.md")}
    links = [f"- [{f.title}]({f.name}.md)" for f in families() if f.name in pages]
    hosts = ["## Versions of vLLM-Omni", "", support_table(), ""]
    return "\n".join(["# Models", "", table.stdout, *links, "", *hosts])


def settings_page() -> str:
    """Every variable, its default, and what the settings class says of it."""
    from vllm_tts_cache import config

    told = _attributes(config.Settings)
    defaults = {field.name: field.default for field in fields(config.Settings)}
    lines = [
        "# Settings",
        "",
        "Environment variables, read once at start. A value that cannot be used, or",
        "an unknown variable that begins with `SPEAKER_CACHE_`, is an error that names",
        "the variable.",
        "",
        "| variable | default | |",
        "| --- | --- | --- |",
    ]
    for variable, (name, _) in config.VARIABLES.items():
        text = told[name].replace("``", "`")
        lines.append(f"| `{variable}` | {_default(defaults[name])} | {text} |")
    return "\n".join([*lines, ""])


def http_page() -> str:
    """Each route of ours with its fields, and each answer's."""
    from fastapi import FastAPI

    from vllm_tts_cache.entrypoints.attach import routers

    app = FastAPI()
    for router in routers():
        app.include_router(router)
    document: Json = app.openapi()
    lines = [
        "# HTTP, every field",
        "",
        "Made of the server's own `/openapi.json`, which has the host's routes too.",
        "What the routes mean is told in [HTTP](../http-api.md).",
        "",
    ]
    schemas: Json = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += _operation(f"{method.upper()} {path}", operation, schemas)
    lines += ["## Objects", ""]
    for name, schema in sorted(schemas.items()):
        lines += _object(name, schema)
    return "\n".join(lines)


def _operation(title: str, operation: Json, schemas: Json) -> Iterator[str]:
    yield from (f"## {title}", "", operation.get("description", ""), "")
    rows = [
        (p["name"], p["schema"], p.get("required"), p.get("description", ""))
        for p in operation.get("parameters", [])
    ]
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        name = body["schema"].get("$ref", "").rsplit("/", 1)[-1]
        if name.startswith("Body_"):
            schema = schemas.pop(name)
            rows += _rows(schema)
        elif name:
            yield from (f"Body: [{name}](#{name.lower()}), `{kind}`.", "")
    yield from _table(rows)
    for status, answer in operation["responses"].items():
        yield f"- {status}: {_answer(answer)}"
    yield ""


def _answer(answer: Json) -> str:
    content: Json = answer.get("content", {})
    schemas = [_type(body.get("schema", {})) for body in content.values()]
    return ", ".join(s for s in schemas if s) or ", ".join(f"`{c}`" for c in content)


def _object(name: str, schema: Json) -> Iterator[str]:
    yield from (f"### {name}", "", schema.get("description", ""), "")
    yield from _table(_rows(schema))


def _rows(schema: Json) -> list[tuple[str, Json, bool, str]]:
    required = schema.get("required", [])
    return [
        (name, field, name in required, field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    ]


def _table(rows: list[tuple[str, Json, Any, str]]) -> Iterator[str]:
    if not rows:
        return
    yield from ("| field | type | |", "| --- | --- | --- |")
    for name, field, required, description in rows:
        must = "required" if required else _default(field.get("default"))
        text = ". ".join(
            part for part in (must, description.replace("|", "\\|")) if part
        )
        yield f"| `{name}` | {_type(field)} | {text} |"
    yield ""


def _type(field: Json) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(_type(each) for each in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return field.get("type", "")


def _default(value: Any) -> str:
    if value in (None, "", (), MISSING):
        return ""
    if isinstance(value, bool):
        return "`1`" if value else "`0`"
    if isinstance(value, int) and value >= 1024**2:
        unit, name = (1024**3, "GiB") if value >= 1024**3 else (1024**2, "MiB")
        return f"{value / unit:g} {name}"
    return f"`{str(value).replace(str(Path.home()), '~')}`"


def _attributes(kind: type) -> dict[str, str]:
    """The attributes that a docstring tells of, each on one line."""
    section = inspect.getdoc(kind).split("Attributes:\n", 1)[1].split("\n\n", 1)[0]
    entries = re.split(r"\n(?=    \w+: )", "\n" + section)
    pairs = (entry.strip().split(": ", 1) for entry in entries if entry.strip())
    return {name: " ".join(text.split()) for name, text in pairs}
