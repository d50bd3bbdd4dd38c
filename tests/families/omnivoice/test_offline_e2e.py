"""Through the real engine, a clone by address is heard as one by waveform."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from tests.audio_clips import voiced
from vllm_tts_cache.families.omnivoice.family import FAMILY
from vllm_tts_cache.families.omnivoice.silence import RATE_HZ

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROOT = Path(__file__).parents[3]
PITCHES_HZ = (220.0, 330.0, 480.0)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def heard(omnivoice_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heard")
    clips = []
    for number, pitch_hz in enumerate(PITCHES_HZ):
        clips.append(folder / f"{number}.wav")
        samples = voiced(RATE_HZ, 2.0 + number, pitch_hz=pitch_hz)
        soundfile.write(clips[-1], samples, RATE_HZ, subtype="FLOAT")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.families.omnivoice.heard"),
            *(str(omnivoice_checkpoint), str(FAMILY.deploy_file), *map(str, clips)),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            **ENVIRONMENT,
            "SPEAKER_SAMPLES_DIR": str(folder / "speakers"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    (line,) = (ln for ln in done.stdout.splitlines() if ln.startswith("{"))
    return json.loads(line)


def test_a_clone_by_address_is_heard_as_the_hosts_by_waveform(heard):
    assert heard["by_address"] == heard["by_waveform"]
    assert "silence" not in heard["by_address"]


def test_every_voice_is_heard_and_none_is_anothers(heard):
    spoken = [*heard["by_address"], heard["without_a_voice"]]
    assert len(set(spoken)) == len(PITCHES_HZ) + 1


def test_voices_that_speak_together_are_heard_as_alone(heard):
    alone = [*heard["by_address"], heard["without_a_voice"]]
    assert heard["together"] == alone
    assert heard["again"] == alone[:-1][::-1]


def test_each_clip_is_encoded_once(heard):
    worker = heard["worker"]
    assert worker["encodes"] == dict.fromkeys(FAMILY.encoders, len(PITCHES_HZ))
    assert worker["failed_prompts"] == 0
    assert worker["prompts"] == 3 * len(PITCHES_HZ)
