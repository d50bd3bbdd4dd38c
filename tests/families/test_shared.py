"""What holds of every family in the list, without a server."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families.cases import every_case, unlike_cases
from tests.tiny_files import contents
from vllm_tts_cache.speaker.family import CloneFacts, families, family_of_checkpoint
from vllm_tts_cache.testing.tiny_checkpoint import MARKER, TinyCheckpoint

WEIGHTS = (".safetensors", ".pt", ".pth", ".onnx")


def test_ours_are_all_there_and_can_be_read_without_torch():
    program = (
        "import sys\n"
        "from vllm_tts_cache.speaker.family import families\n"
        "print([f.name for f in families()])\n"
        "print({'torch', 'vllm', 'vllm_omni', 'transformers'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{[f.name for f in families()]}\nset()\n"
    assert done.stderr == "", "no family was left out"
    folders = {path.parent.name for path in ours().glob("*/family.py")}
    assert folders == {family.name for family in families()}


def ours():
    import vllm_tts_cache.families

    return Path(next(iter(vllm_tts_cache.families.__path__)))


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_part_that_it_names_is_there(family):
    names = [family.adapter, *family.models.values(), *family.pipelines.values()]
    names += family.encoders_part, family.offline_part
    names += family.tiny_part, family.tiny_options
    for name in filter(None, names):
        assert pkgutil.resolve_name(name) is not None
    assert family.deploy_file is None or family.deploy_file.is_file()
    assert (ours() / family.name / "README.md").is_file()


@every_case
def test_its_tiny_checkpoint_is_of_it_and_clones(case, tiny):
    assert family_of_checkpoint(tiny(case.family)) is case.family
    assert case.family.clones(tiny(case.family)) is None


@unlike_cases
def test_another_seed_changes_all_weights_and_nothing_else(case, tiny, tmp_path):
    other = TinyCheckpoint(case.family, seed=1).write(tmp_path / "other")
    one, two = contents(tiny(case.family)), contents(other)
    changed = {name for name in one if one[name] != two[name]}
    assert changed == {name for name in one if name.endswith(WEIGHTS)} | {MARKER}


@unlike_cases
def test_another_process_writes_the_same_tiny_checkpoint(case, tiny, tmp_path):
    command = (
        "from vllm_tts_cache.entrypoints.cli import main; raise SystemExit(main())"
    )
    arguments = ["make-checkpoint", "--family", case.family.short_name, "--out"]
    subprocess.run(
        [sys.executable, "-c", command, *arguments, str(tmp_path / "again")],
        env={**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert contents(tmp_path / "again") == contents(tiny(case.family))


@every_case
def test_a_voice_with_a_transcript_has_a_mode_whatever_a_request_says(case):
    facts = CloneFacts(stored_transcript=True)
    assert case.family.mode(facts) in case.family.modes
    for mode in case.family.modes:
        named = CloneFacts(stored_transcript=True, named=mode.name)
        assert case.family.mode(named) is mode
        precomputed = case.family.precomputed(has_transcript=True)
        assert set(mode.encoders) <= set(precomputed)
