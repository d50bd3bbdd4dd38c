"""The host's harness is given a clip once, whether ours or of a data set."""

from pathlib import Path

import pytest

from benchmarks.harness import Clips


def _paths(dataset: Path) -> list[Path]:
    lines = (dataset / "en" / "meta.lst").read_text().splitlines()
    return [Path(line.split("|")[2]) for line in lines]


def test_no_clip_is_given_out_twice(tmp_path: Path) -> None:
    clips = Clips(tmp_path)
    paths = _paths(clips.take(2)) + _paths(clips.take(3))

    assert len({path.read_bytes() for path in paths}) == len(paths) == 5


def test_a_clip_of_a_dataset_is_given_out_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "en").mkdir(parents=True)
    lines = ["a|said|wavs/a.wav|One.", "b|said|wavs/a.wav|Two.", "c|said|c.wav|Three."]
    (source / "en" / "meta.lst").write_text("\n".join(lines))
    clips = Clips(tmp_path, source)

    (first,), (second,) = _paths(clips.take(1)), _paths(clips.take(1))

    assert [first, second] == [source / "en" / "wavs/a.wav", source / "en" / "c.wav"]
    with pytest.raises(RuntimeError, match=r"has 2 different clips.*--rounds"):
        clips.take(1)
