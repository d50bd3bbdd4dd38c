"""Our part of /openapi.json is what our routes do, as schemathesis tries it."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.speech_server import Server, listening, running

pytestmark = [pytest.mark.slow, pytest.mark.long]

OURS = "^/v1/audio/(voices|voice_consents|speaker_cache)"
# Of its checks: a schema cannot say that a clip is audio, or that a time is to come, so
# what it allows may be refused; and Starlette tells in `Allow` the methods of the first
# route of a path only, for all routes of the host as well.
LEFT_OUT = "positive_data_acceptance,allow_header_conformance"
PATIENCE_SECONDS = 600


async def test_schemathesis_finds_nothing(default_checkpoint, tmp_path, monkeypatch):
    async with running(
        Server(default_checkpoint, tmp_path / "speakers", monkeypatch)
    ) as server:
        async with listening(server.app) as port:
            process = await asyncio.create_subprocess_exec(
                Path(sys.executable).with_name("schemathesis"),
                "run",
                f"http://127.0.0.1:{port}/openapi.json",
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
        assert b"Selected: 19" in told  # operations; none is left out unseen
        assert server.service.store.verify() == []
