"""Our codes are those of omnivoice 0.2.1, and so is what is done to a clip before."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm_omni.diffusion.data import DiffusionOutput

from tests.families import clip as clips
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.families.omnivoice import encoders as ours
from vllm_tts_cache.families.omnivoice import preparation
from vllm_tts_cache.families.omnivoice.prompt import with_full_stop
from vllm_tts_cache.families.omnivoice.worker import as_loud
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

CPU = torch.device("cpu")
HERE = Path(__file__).parent
SAMPLES_PER_FRAME = 960
LOUD, QUIET, FAINT = 0.3, 0.02, 0.002


Clip = partial(clips.Clip, level=LOUD, floor=0.0)

# Loud, quiet and faint ones; with pauses around all that counts: 200 ms within a clip,
# 100 before it and 200 behind it, found every 10 ms. With noise in them about as loud
# as silence may be, 0.0032, before and after a clip is made louder. Lengths: the
# shortest allowed, whole frames and milliseconds and one sample more or less, primes.
CLIPS = (
    Clip(24_000, 24_000),
    Clip(24_000, 72_000, level=QUIET),
    Clip(24_000, 72_011, level=FAINT, subtype="FLOAT"),
    Clip(24_000, 72_013, pauses=((0.8, 1.8),)),
    Clip(24_000, 96_000, level=QUIET, pauses=((0.8, 1.8), (2.5, 2.71))),
    Clip(24_000, 96_012, pauses=((1.0, 1.19), (2.0, 2.2), (3.0, 3.21))),
    Clip(24_000, 72_007, pauses=((1.01, 1.425),)),
    Clip(24_000, 95_988, pauses=((1.0, 1.4), (1.5, 1.9), (2.0, 2.401))),
    Clip(24_000, 96_001, pauses=((0.0, 0.09),)),
    Clip(24_000, 95_999, pauses=((0.0, 0.5), (3.5, 4.0))),
    Clip(24_000, 84_001, pauses=((0.0, 0.11), (3.29, 3.5))),
    Clip(24_000, 84_000, floor=0.003, pauses=((1.0, 2.0),)),
    Clip(24_000, 84_000, floor=0.0034, pauses=((1.0, 2.0),)),
    Clip(24_000, 84_000, level=QUIET, floor=0.0006, pauses=((1.0, 2.0),)),
    Clip(24_000, 240_007, pauses=tuple((s + 0.3, s + 0.8) for s in range(9))),
    Clip(24_000, 719_999, pauses=((5.0, 9.0), (20.0, 20.5))),
    Clip(8_000, 8_000),
    Clip(8_000, 24_413, level=QUIET, num_channels=2, pauses=((1.0, 1.7),)),
    Clip(11_025, 55_127, subtype="PCM_24", pauses=((2.0, 2.5),)),
    Clip(16_000, 48_001, level=QUIET, subtype="FLOAT"),
    Clip(16_000, 479_999, pauses=((3.0, 4.0),)),
    Clip(22_050, 66_150, pauses=((0.0, 0.3), (1.0, 1.5)), num_channels=2),
    Clip(32_000, 96_017, level=FAINT, subtype="PCM_24"),
    Clip(44_100, 132_301, pauses=((0.8, 1.8),)),
    Clip(44_100, 132_300, level=QUIET, num_channels=2, subtype="PCM_24"),
    Clip(48_000, 144_017, level=QUIET, subtype="FLOAT", pauses=((1.5, 2.0),)),
    Clip(48_000, 48_000, num_channels=2),
    Clip(96_000, 191_999, subtype="PCM_24", pauses=((0.5, 1.2),)),
)
SPOKEN = (SPEECH.path, OTHER_SPEECH.path)
TEXTS = (
    "Hello there",
    " Hello there. ",
    "Is it?",
    "(aside)",
    "[laughter]",
    'quoted"',
    "a list,",
    "你好",
    "你好 there",
    "你好\uff01",
    "Grüße…",
    "and a dash -",
    "two\nlines",
    "",
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return {clip.stem: clip.write(folder) for clip in CLIPS}


@pytest.fixture(scope="module")
def official(own_checkpoint, paths, tmp_path_factory):
    """What the official package makes of all clips, and of the texts."""
    folder = tmp_path_factory.mktemp("official")
    texts, out = folder / "texts.json", folder / "out.safetensors"
    texts.write_text(json.dumps(TEXTS))
    done = subprocess.run(
        (
            *(sys.executable, str(HERE / "official_encode.py")),
            *(str(own_checkpoint), str(texts), str(out)),
            *map(str, (*paths.values(), *SPOKEN)),
        ),
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    return load_file(out) | json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def encoder(own_checkpoint, one_thread):
    return ours.load_reference_encoders(own_checkpoint, CPU)["codec"]


@pytest.mark.parametrize("clip", [*CLIPS, *SPOKEN], ids=lambda clip: clip.stem)
def test_codes_and_loudness_equal_the_official_ones(clip, paths, official, encoder):
    """Also of FLAC files, which the official package reads as well."""
    path = paths.get(clip.stem, clip)
    audio, stem = decode_path(path).audio, path.stem
    prepared = preparation.prepare(audio, SAMPLES_PER_FRAME)
    assert np.array_equal(prepared.samples, official[f"{stem}/samples"].numpy())
    encoding = encoder.encode(audio)
    assert encoding["rms"].astype(np.float64) == official[f"{stem}/rms"].numpy()
    codes = encoding["codes"]
    assert codes.dtype == np.int16
    assert np.array_equal(codes.T, official[f"{stem}/codes"].numpy())
    if path is not clip:
        assert len(np.unique(codes)) > len(codes)  # no network that gives one for all


def our_answer(official, rms) -> torch.Tensor:
    """Of what the official package was given to answer with."""
    answer: Any = as_loud(DiffusionOutput(output=official["answer"]), rms).output
    return answer


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.stem)
def test_an_answer_is_made_as_loud_as_the_official_one(clip, paths, official):
    path = paths[clip.stem]
    rms = preparation.prepare(decode_path(path).audio, SAMPLES_PER_FRAME).rms
    answer = our_answer(official, float(rms))
    assert torch.allclose(answer, official[f"{path.stem}/answer"], rtol=1e-6, atol=0)


def test_an_answer_without_a_voice_is_as_loud_as_the_hosts(official):
    """The official package brings it to one peak."""
    answer = our_answer(official, None)
    assert torch.equal(answer, official["answer"])
    assert float(answer.abs().max()) < 0.49
    assert float(official["plain"].abs().max()) == pytest.approx(0.5)


def test_transcripts_end_as_the_official_ones_do(official):
    assert [with_full_stop(text) for text in TEXTS] == official["ended"]


def test_the_host_joins_transcript_and_text_as_the_official_package_does(official):
    from vllm_omni.diffusion.models.omnivoice import pipeline_omnivoice as host

    joined = [
        host._combine_text(text="What is said.", ref_text=text)
        for text in official["ended"]
    ]
    assert joined == official["combined"]


def test_a_rate_that_nobody_records_at_takes_no_gigabytes(tmp_path, encoder):
    path = Clip(44_101, 88_202).write(tmp_path)
    encoding = encoder.encode(decode_path(path).audio)
    assert encoding["codes"].shape == (50, 8)


@pytest.mark.parametrize("samples", [[0.5] * 936, [0.5] * 240, [0.0] * 48_000], ids=len)
def test_less_than_a_frame_and_all_silence_are_errors_that_say_so(samples, encoder):
    given = ReferenceAudio.of(np.array(samples, np.float32), 24_000)
    with pytest.raises(EncodeError, match="nothing is left"):
        encoder.encode(given)
