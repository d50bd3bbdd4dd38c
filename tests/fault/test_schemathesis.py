"""Our part of /openapi.json is what our routes do, as schemathesis tries it."""

import asyncio
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.speaking import wav
from tests.speech_server import Server, listening, running

pytestmark = [pytest.mark.slow, pytest.mark.long]

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
OURS = "^/v1/audio/(voices|voice_consents|speaker_cache)"
# Of its checks: a schema cannot say that a clip is audio, or that a time is to come, so
# what it allows may be refused; and Starlette tells in `Allow` the methods of the first
# route of a path only, for all routes of the host as well.
LEFT_OUT = "positive_data_acceptance,allow_header_conformance"
PATIENCE_SECONDS = 600
# So many that some are left of those that are deleted on the way.
NUM_EACH = 40
# What it makes of a schema is never a clip, a bundle, or an embedding of this model.
WITHOUT_SUCCESS = {
    f"POST {VOICES}",
    f"POST {VOICES}/check",
    f"POST {VOICES}/import",
    f"POST {CONSENTS}",
}


async def filled(server):
    """Names of voices, and ids of recordings, that are there; by path parameter."""
    form = {"name": "Ann's", "language": "de"}
    names, consents = [], []
    for number in range(NUM_EACH):
        name = f"voice {number:02}" if number else "keeper"
        answer = await server.register(name, wav(), check="false")
        names.append(name if number % 2 else answer.json()["id"])
        file = {"recording": ("c.wav", wav(), "audio/wav")}
        answer = await server.client.post(CONSENTS, data=form, files=file)
        consents.append(answer.json()["id"])
    return {"name": names, "consent_id": consents}


def naming(document, there):
    """The document, of which every other name is of something that is there."""
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", []):
                if (known := there.get(parameter["name"])) is not None:
                    parameter["schema"] = named(parameter["in"], known)
    return document


def named(place, known):
    one = {"anyOf": [{"type": "string", "enum": known}, {"type": "string"}]}
    if place == "path":
        return {**one, "examples": known[:2]}
    # No more than the web server reads of a request's first line: it refuses by itself.
    return {"type": "array", "items": one, "maxItems": 20, "examples": [known[:2]]}


def operations_of(document):
    return {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
        if re.search(OURS, path)
    }


def counting(app, statuses):
    """The application; notes what each of its operations answered."""

    async def counted(scope, receive, send):
        async def noted(message):
            if message["type"] == "http.response.start" and "route" in scope:
                operation = f"{scope['method']} {scope['route'].path}"
                statuses[operation].add(message["status"])
            await send(message)

        await app(scope, receive, noted)

    return counted


async def test_schemathesis_finds_nothing(default_checkpoint, tmp_path, monkeypatch):
    statuses = defaultdict(set)
    async with running(
        Server(default_checkpoint, tmp_path / "speakers", monkeypatch)
    ) as server:
        document = (await server.client.get("/openapi.json")).json()
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(naming(document, await filled(server))))
        async with listening(counting(server.app, statuses)) as port:
            process = await asyncio.create_subprocess_exec(
                Path(sys.executable).with_name("schemathesis"),
                "run",
                str(file),
                f"--url=http://127.0.0.1:{port}",
                f"--include-path-regex={OURS}",
                f"--exclude-checks={LEFT_OUT}",
                "--phases=examples,coverage,fuzzing",
                "--max-examples=25",
                "--continue-on-failure",
                "--no-color",
                cwd=tmp_path,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            told, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        assert process.returncode == 0, told.decode()
        # None is left out unseen.
        num_operations = len(operations_of(document))
        assert f"Selected: {num_operations}/" in told.decode()
        successful = {name for name, found in statuses.items() if 200 in found}
        assert operations_of(document) - successful == WITHOUT_SUCCESS
        assert server.service.store.verify() == []
