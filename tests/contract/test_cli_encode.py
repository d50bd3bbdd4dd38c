from dataclasses import asdict

import numpy as np
import pytest
import soundfile
import torch
from safetensors import safe_open

from tests.families.cases import every_case
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.entrypoints.cli import models
from vllm_tts_cache.errors import ConfigError, InvalidAudioError
from vllm_tts_cache.speaker.precision import computed_on


def write_clip(path, pitch_hz=200):
    seconds = np.arange(24_000) / 24_000
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.3 * np.sin(2 * np.pi * pitch_hz * seconds), 24_000)
    return path


def run(*arguments):
    return models.encode_app([*map(str, arguments)], standalone_mode=False) or 0


@every_case
def test_the_file_has_what_the_encoders_give_and_which_they_were(case, tiny, tmp_path):
    checkpoint = tiny(case.family)
    clips = write_clip(tmp_path / "alice.wav"), write_clip(tmp_path / "bob.flac", 300)
    out = tmp_path / "new" / "encodings.safetensors"
    out.parent.mkdir()
    (out.parent / ".partial-export-of-killed").write_bytes(b"half of alice")
    assert run("--model", checkpoint, "-o", out, *clips) == 0
    assert list(out.parent.iterdir()) == [out]
    encoders = case.family.part("encoders_part")(checkpoint, torch.device("cpu"))
    with safe_open(out, "numpy") as file:
        metadata = file.metadata()
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected_metadata = {f"fingerprint/{n}": e.fingerprint for n, e in encoders.items()}
    expected = {}
    for clip in clips:
        audio = decode_path(clip).audio
        expected_metadata[f"audio_sha256/{clip.stem}"] = audio.audio_sha256
        for name, encoder in encoders.items():
            for array_name, array in encoder.encode(audio).arrays.items():
                expected[f"{clip.stem}/{name}/{array_name}"] = array
    expected_metadata |= asdict(computed_on(torch.device("cpu")))
    assert metadata == expected_metadata
    assert stored.keys() == expected.keys()
    for name, array in expected.items():
        assert stored[name].dtype == array.dtype
        assert np.array_equal(stored[name], array)


def test_two_clips_of_one_stem_are_refused_before_anything_is_encoded(tmp_path):
    clips = tmp_path / "a" / "alice.wav", tmp_path / "b" / "alice.flac"
    with pytest.raises(ConfigError, match=r"alice\.wav and .*alice\.flac"):
        run("--model", "unread", "--out", tmp_path / "out.safetensors", *clips)


def test_an_unusable_clip_is_named_and_no_file_is_written(default_checkpoint, tmp_path):
    good, bad = write_clip(tmp_path / "good.wav"), tmp_path / "bad.wav"
    bad.write_bytes(b"not audio")
    out = tmp_path / "out.safetensors"
    with pytest.raises(InvalidAudioError, match=r"bad\.wav"):
        run("--model", default_checkpoint, "--out", out, good, bad)
    assert not out.exists()
