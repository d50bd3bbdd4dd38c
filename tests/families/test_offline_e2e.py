"""Through the real engine, a clone by address is heard as one by waveform."""

import json
from importlib import import_module

import pytest
import soundfile

from tests.audio_clips import voiced
from tests.e2e.test_offline import ran
from tests.families.cases import cases

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PITCHES_HZ = (220.0, 330.0, 480.0)
# Each has a part of the program in its folder.
HEARD = [case.family for case in cases() if case.name in ("omnivoice", "voxcpm2")]


@pytest.fixture(scope="module", params=HEARD, ids=lambda family: family.name)
def heard(request, tiny, tmp_path_factory):
    """What was heard, and of how many clones, on which family."""
    family, folder = request.param, tmp_path_factory.mktemp("heard")
    part = import_module(f"tests.families.{family.name}.heard")
    clips = []
    for number, pitch_hz in enumerate(PITCHES_HZ):
        clips.append(folder / f"{number}.wav")
        samples = voiced(part.RATE_HZ, 2.0 + number, pitch_hz=pitch_hz)
        soundfile.write(clips[-1], samples, part.RATE_HZ, subtype="FLOAT")
    given = family.name, tiny(family), family.deploy_file, *clips
    out = ran(folder / "speakers", "-m", "tests.families.heard", *given)
    (line,) = (ln for ln in out.splitlines() if ln.startswith("{"))
    return json.loads(line), len(PITCHES_HZ) * len(part.TRANSCRIPTS), family


def test_a_clone_by_address_is_heard_as_the_hosts_by_waveform(heard):
    found, num_clones, _ = heard
    assert found["by_address"] == found["by_waveform"]
    assert "silence" not in found["by_address"]
    # Every voice and mode, and none is another's.
    assert len({*found["by_address"], found["without_a_voice"]}) == num_clones + 1


def test_voices_that_speak_together_are_heard_as_alone(heard):
    found, *_ = heard
    alone = [*found["by_address"], found["without_a_voice"]]
    assert found["together"] == alone
    assert found["again"] == alone[:-1][::-1]


def test_each_clip_is_encoded_once_for_each_mode(heard):
    found, num_clones, family = heard
    worker = found["worker"]
    assert worker["encodes"] == dict.fromkeys(family.encoders, len(PITCHES_HZ))
    assert worker["failed_prompts"] == 0
    assert worker["prompts"] == 3 * num_clones
