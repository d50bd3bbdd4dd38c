import json
from pathlib import Path

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.catalogue.records import NewSpeaker
from vllm_tts_cache.entrypoints.cli.voices.manifest import (
    ManifestError,
    NewVoice,
    read_manifest,
)
from vllm_tts_cache.logs import printable

NOISE = (0.1 * np.random.default_rng(0).standard_normal(8_010)).astype(np.float32)
CLIP = sndfile_bytes(NOISE, 8_000)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.wav").write_bytes(CLIP)
    return tmp_path


def manifest(folder, text, encoding="utf-8"):
    path = folder / "voices.csv"
    path.write_bytes(text.encode(encoding))
    return path


def problems(folder, text, encoding="utf-8"):
    with pytest.raises(ManifestError) as refused:
        read_manifest(manifest(folder, text, encoding), consent="signed")
    return refused.value.problems


def test_every_column_reaches_the_form(folder):
    path = manifest(
        folder,
        "name,audio,consent,ref_text,language,labels,label:team,description,"
        "expires_at\n"
        'Ann,clips/a.wav,signed,"Hello, you.",de,"{""age"": ""old""}",news,warm,'
        "2091-01-01T00:00:00Z\n",
        encoding="utf-8-sig",  # as spreadsheets write it
    )
    [voice] = read_manifest(path, consent=None)
    form = voice.form(precompute=True, check=False)
    assert json.loads(form.pop("labels")) == {"age": "old", "team": "news"}
    assert float(form.pop("expires_at")) == 3_818_448_000
    assert form == {
        "name": "Ann",
        "consent": "signed",
        "ref_text": "Hello, you.",
        "language": "de",
        "speaker_description": "warm",
        "precompute": "true",
        "check": "false",
    }
    assert (voice.clips, voice.row) == ((folder / "clips" / "a.wav",), 2)


def test_all_that_is_wrong_is_said_with_its_row(folder):
    (folder / "clips" / "empty.wav").write_bytes(b"")
    (folder / "clips" / "large.wav").write_bytes(bytes(10 * 1024**2 + 1))
    rows = [
        ("ann,clips/a.wav,", None),
        ("a/b,clips/a.wav,", "name"),
        ("Ann ,clips/a.wav,", "row 2 as well"),
        ("bob,clips/none.wav,", "no such file"),
        ("eve,clips/empty.wav,", "empty"),
        ("sue,clips/large.wav,", "at most 10 MB"),
        ("tom,,", "column audio is empty"),
        ("lee,clips/a.wav,2001-01-01", "in the past"),
        ("may,clips/a.wav,soon", "neither ISO 8601"),
    ]
    lines = ["name,audio,expires_at", *(row for row, _ in rows)]
    found = problems(folder, "\n".join(lines))
    expected = [(at, said) for at, (_, said) in enumerate(rows, start=2) if said]
    assert [row for row, _ in found] == [row for row, _ in expected]
    for (_, reason), (_, said) in zip(found, expected, strict=True):
        assert said in reason


@pytest.mark.parametrize(
    ("text", "said"),
    (
        ("", "its heading is []"),
        ("name,audio\nJörg,clips/a.wav\n", "cannot be read"),  # of Latin 1
        ("name,audio\n", "it has no rows"),
        ("name,sound\nann,clips/a.wav\n", "'sound'"),
        ("name,name,audio\nann,ann,clips/a.wav\n", "each once"),
        ("name,audio\nann,clips/a.wav,Hello, you\n", "put a cell with commas"),
        ('name,audio\nann,"clips/a.wav\n', "cannot be read"),
    ),
)
def test_a_file_that_is_no_manifest_is_refused_whole(folder, text, said):
    [(row, reason)] = problems(folder, text, encoding="latin-1")
    assert row is None
    assert said in reason


def test_a_row_without_consent_takes_that_of_all(folder):
    rows = "name,audio,consent\nann,clips/a.wav,\nbob,clips/a.wav,his\n"
    path = manifest(folder, rows)
    consents = [v.speaker.consent for v in read_manifest(path, consent="all")]
    assert consents == ["all", "his"]
    with pytest.raises(ManifestError, match="row 2: Invalid consent"):
        read_manifest(path, consent=None)


def test_several_clips_of_a_voice_stand_in_one_cell(folder):
    (folder / "clips" / "b.wav").write_bytes(CLIP)
    (folder / "clips" / "a;b.wav").write_bytes(CLIP)
    path = manifest(
        folder,
        "name,audio,ref_text\n"
        'ann,clips/a.wav; clips/b.wav,"one\ntwo"\n'
        "bob,clips/a;b.wav,one\n",
    )
    ann, bob = read_manifest(path, consent="signed")
    assert [clip.name for clip in ann.clips] == ["a.wav", "b.wav"]
    assert [clip.name for clip in bob.clips] == ["a;b.wav"]
    assert ann.form(precompute=True, check=False)["ref_text"] == "one\ntwo"


@pytest.mark.parametrize(
    ("audio", "ref_text", "said"),
    (
        ("clips/a.wav;clips/a.wav", "one", "1 line, and the voice 2 clips"),
        ("clips/a.wav;clips/no.wav", "", "no such file"),
        ("clips/a.wav;", "", "nothing on one side"),
    ),
)
def test_what_is_wrong_with_several_clips_is_said(folder, audio, ref_text, said):
    text = f"name,audio,ref_text\nann,{audio},{ref_text}\n"
    [(row, reason)] = problems(folder, text)
    assert row == 2 and said in reason


def voice(num_clips=1, **fields):
    fields |= {"embedding": (1.0,), "clip_starts": tuple(range(num_clips))}
    ann = NewSpeaker(name="ann", consent="signed", **fields)
    return NewVoice(speaker=ann, clips=(Path("a.wav"),) * num_clips)


def registered(**fields):
    sha = decode(CLIP).audio.audio_sha256
    shown = {"name": "ann", "consent": "signed", "audio_sha256": sha}
    return {**shown, "labels": {}, **fields}


def test_equal_texts_and_samples_are_no_difference():
    assert voice().differences(registered(), [CLIP]) == []
    samples = (NOISE * 32_767).astype(np.int16)
    flac = sndfile_bytes(samples, 8_000, "FLAC")
    wav = sndfile_bytes(samples, 8_000, "WAV")
    there = registered(audio_sha256=decode(wav).audio.audio_sha256)
    assert voice().differences(there, [flac]) == []


@pytest.mark.parametrize(
    ("fields", "there", "differing"),
    (
        ({"ref_text": "Hello."}, {}, ["ref_text"]),
        ({}, {"ref_text": "Hello."}, ["ref_text"]),
        ({"labels": {"a": "b"}}, {"labels": {"a": "c"}}, ["labels"]),
        ({"expires_at": 4e9 + 0.5}, {"expires_at": 4_000_000_000}, []),
        ({}, {"audio_sha256": "0" * 64}, ["audio"]),
    ),
)
def test_what_differs_is_named_as_the_server_names_it(fields, there, differing):
    assert voice(**fields).differences(registered(**there), [CLIP]) == differing


@pytest.mark.parametrize(
    ("text", "shown"),
    (
        ("plain, ü, 声", "plain, ü, 声"),
        ("\x1b[2Jgone\n", r"\x1b[2Jgone\n"),
        ("a\u202eb\ud800", r"a\u202eb\ud800"),
        ("x" * 2000, "x" * 999 + "…"),
    ),
)
def test_what_others_write_moves_no_cursor(text, shown):
    assert printable(text) == shown
