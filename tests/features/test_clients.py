"""Clients of OpenAI's API speak with registered voices, by the code of their packages.

They are set up as their users have them: with OpenAI's names of models, which the
server is given, and with each client's own format. The server says which rate PCM has.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.served import Servers

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients/bin/python"
NAMES = ("--served-model-name", "tts-1", "gpt-4o-mini-tts")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]
pytestmark += [pytest.mark.every_family]


@pytest.fixture(scope="module")
def named_as_openais(family, checkpoint, tmp_path_factory, make_clip):
    own = Servers(family, checkpoint, tmp_path_factory.mktemp("clients"))
    server, client = own.start(NAMES, SPEAKER_PCM_SAMPLE_RATE=24_000)
    fields = {"ref_text": "Hello there.", "aliases": '["alloy"]'}
    client.register("keeper", make_clip(), **fields).raise_for_status()
    client.precompute("keeper").raise_for_status()
    yield server
    own.stop()


@pytest.mark.parametrize(
    ("client", "model", "voice"),
    [
        ("livekit", "gpt-4o-mini-tts", "keeper"),  # events with MP3
        ("livekit", "tts-1", "keeper"),  # a stream of MP3
        ("agent", "gpt-4o-mini-tts", "keeper"),
        ("pipecat", "gpt-4o-mini-tts", "alloy"),  # PCM, and no voice but OpenAI's
        ("litellm", "tts-1", "keeper"),
        ("dify", "tts-1", "alloy"),
    ],
)
def test_it_speaks_by_its_own_code(named_as_openais, client, model, voice):
    script = Path(__file__).parent / "speak_by_client.py"
    url = f"{named_as_openais.url}/v1"
    command = [PYTHON, script, client, url, model, voice]
    how = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, **how, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    heard = json.loads(done.stdout.splitlines()[-1])
    assert heard["samples"] > heard["rate"] / 10, heard
