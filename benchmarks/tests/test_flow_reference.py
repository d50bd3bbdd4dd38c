"""What the flow's benchmark prints and writes, with small networks."""

import json

import pytest
import torch

from benchmarks import flow_reference
from benchmarks.flow_reference import Chunk, chunks_of


def test_a_run_ends_with_a_table_and_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flow_reference, "SPOKEN_SECONDS", (1,))
    monkeypatch.setattr(flow_reference, "REFERENCE_SECONDS", (0, 3))
    num_threads = torch.get_num_threads()
    flow_reference.main(["--small", "--rounds", "1", "--out", str(tmp_path)])
    assert torch.get_num_threads() == num_threads
    [path] = tmp_path.glob("*.json")
    written = json.loads(path.read_text())
    assert written["settings"]["decoder"] == "small"
    found = {row["what"]: row["ours"]["median"] for row in written["rows"]}
    # Of two layers and two steps: the first layer of the first step.
    assert found["of 4 layers and steps, whose reference's keys no text changes"] == 1
    assert len([what for what in found if what.startswith("flow, ")]) == 2
    shown = capsys.readouterr().out
    assert all(what in shown for what in found)


@pytest.mark.parametrize("num_reference", [0, 70, 75])
def test_the_chunks_are_the_hosts(num_reference):
    """The first one ends where a chunk does, counted from the reference's beginning."""
    chunks = list(chunks_of(100, num_reference))
    rest = -num_reference % 15
    assert chunks[0] == Chunk(15 + rest + 3, 0, is_last=False)
    assert chunks[-1] == Chunk(100, chunks[-1].num_before, is_last=True)
    heard = [chunk.num_before for chunk in chunks]
    assert heard == sorted(set(heard))
    assert [chunk.is_last for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
