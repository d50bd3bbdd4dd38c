"""What of the files to deploy by can be checked without Docker and Kubernetes."""

import configparser
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from vllm_tts_cache.config import VARIABLES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = ROOT / "examples/open-webui/compose.yaml"
PATTERNS = "deploy/*.yaml", ".github/*/*.yml", "examples/*/*.yaml"
YAML = [path for pattern in PATTERNS for path in ROOT.glob(pattern)]


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_it_is_yaml_of_which_each_volume_is_declared(path):
    whole = yaml.safe_load(path.read_text())
    services = whole.get("services", {}).values()
    mounted = (each for service in services for each in service.get("volumes", ()))
    named = {each.partition(":")[0] for each in mounted}
    assert {name for name in named if name[0] != "."} == {*whole.get("volumes", ())}
    needed = {name for each in services for name in each.get("depends_on", ())}
    assert needed <= {*whole.get("services", ())}


@pytest.mark.parametrize("path", [*DEPLOY.iterdir(), COMPOSE], ids=lambda p: p.name)
def test_it_names_only_settings_that_there_are(path):
    assert {*re.findall(r"\bSPEAKER_\w+\b", path.read_text())} <= {*VARIABLES}


def test_the_compose_file_serves_the_model_that_its_chat_asks_for():
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    named = services["chat"]["environment"]["AUDIO_TTS_MODEL"]
    command = services["speech"]["command"]
    assert f"--served-model-name={named}" in command and "--omni" in command


def test_the_dockerfile_copies_what_the_wheel_is_made_of():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert sum(line.startswith("FROM ") for line in lines) == 2
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    sources = [name for names in copied for name in names if name[0] not in "-/"]
    assert sources and all((ROOT / name).exists() for name in sources)


def test_the_unit_serves_as_the_guide_says():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    unit.read(DEPLOY / "vllm-tts-cache.service")
    guide = (ROOT / "docs/guides/serve.md").read_text()
    command = unit["Service"]["ExecStart"].partition("/bin/")[2]
    assert command.startswith(guide.partition("```sh\n")[2].partition(" --port")[0])


def test_nginx_reads_its_block_which_is_that_of_the_docs(tmp_path):
    ours = (DEPLOY / "nginx.conf").read_text()
    block = re.search(r"```nginx\n(.*?)```", (ROOT / "docs/fleet.md").read_text(), re.S)
    expected = block and re.sub(r"10\.0\.0\.(\d)", r"speech-\1", block[1])
    assert ours.partition("\n")[2] == expected
    here = re.sub(r"speech-\d", "127.0.0.1", ours)
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log stderr; events {{}} http {{ {here} }}"
    )
    command = ["nginx", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
