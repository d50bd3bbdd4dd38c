"""What holds of every family in the list, without a server."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.audio_clips import voiced
from tests.families.cases import every_case
from tests.tiny_files import contents
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.speaker.family import families, family_of_checkpoint
from vllm_tts_cache.speaker.modes import CloneFacts

HERE = Path(__file__).parent
CPU = torch.device("cpu")
# Odd, a sample more and less than whole frames, and too short for one.
AWKWARD = [(8_000, 7_919), (16_000, 2_560), (22_050, 22_051), (24_000, 5_759)]
AWKWARD += [(24_000, 5_761), (44_100, 44_099), (48_000, 1_601), (48_000, 100_003)]


def audio(rate_hz, num_samples, pitch_hz=220.0):
    seconds = num_samples / rate_hz + 0.1
    samples = voiced(rate_hz, seconds, pitch_hz=pitch_hz)[:num_samples]
    return ReferenceAudio.of(np.ascontiguousarray(samples[:, 0], np.float32), rate_hz)


@pytest.fixture(scope="module")
def encoders(tiny):
    """The reference encoders of a case, loaded once."""
    loaded = {}

    def of(case):
        if case.name not in loaded:
            load = case.family.part("encoders_part")
            loaded[case.name] = load(tiny(case.family), CPU)
        return loaded[case.name]

    return of


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
    names += family.encoders_part, family.offline_part, family.tiny_part
    for name in filter(None, names):
        assert pkgutil.resolve_name(name) is not None
    assert family.deploy_file is None or family.deploy_file.is_file()
    assert (ours() / family.name / "README.md").is_file()


@every_case
def test_the_official_package_is_asked(case):
    assert case.family.official
    assert (HERE / case.name / case.official_test).is_file()


@every_case
def test_its_tiny_checkpoint_is_of_it_and_clones(case, tiny):
    assert family_of_checkpoint(tiny(case.family)) is case.family
    assert case.family.clones(tiny(case.family)) is None


@every_case
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
def test_its_modes_need_encoders_that_are_loaded_under_their_own_names(case, encoders):
    loaded = encoders(case)
    assert set(loaded) == set(case.family.encoders)
    assert all(encoder.name == name for name, encoder in loaded.items())
    assert len({e.fingerprint for e in loaded.values()}) == len(loaded)


@every_case
def test_a_voice_with_a_transcript_has_a_mode_whatever_a_request_says(case):
    facts = CloneFacts(stored_transcript=True)
    assert case.family.mode(facts) in case.family.modes
    for mode in case.family.modes:
        named = CloneFacts(stored_transcript=True, named=mode.name)
        assert case.family.mode(named) is mode
        precomputed = case.family.precomputed(has_transcript=True)
        assert set(mode.encoders) <= set(precomputed)


@every_case
def test_speakers_are_told_apart_and_one_is_the_same_twice(case, encoders):
    one, other = audio(24_000, 48_000), audio(24_000, 48_000, pitch_hz=330.0)
    for encoder in encoders(case).values():
        first, again = encoder.encode(one).arrays, encoder.encode(one).arrays
        others = encoder.encode(other).arrays
        for name, array in first.items():
            assert array.tobytes() == again[name].tobytes()
        # In some of it: two speakers may be equally loud.
        assert any(not np.array_equal(first[name], others[name]) for name in first)


@every_case
@pytest.mark.parametrize("rate_hz, num_samples", AWKWARD)
def test_as_many_frames_are_made_as_were_announced(
    case, encoders, rate_hz, num_samples
):
    for name, announced in case.announced.items():
        made = encoders(case)[name].encode(audio(rate_hz, num_samples)).arrays
        assert {len(array) for array in made.values()} == {
            announced(num_samples, rate_hz)
        }
