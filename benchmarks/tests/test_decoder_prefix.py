"""What the decoder's benchmark prints and writes, with a small decoder."""

import json

import torch

from benchmarks import decoder_prefix


def test_a_run_ends_with_a_table_and_a_file(tmp_path, capsys):
    num_threads = torch.get_num_threads()
    given = ["--small", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    decoder_prefix.main(given)
    assert torch.get_num_threads() == num_threads
    [path] = tmp_path.glob("*.json")
    written = json.loads(path.read_text())
    assert written["settings"]["decoder"] == "small"
    found = {row["what"]: row["ours"]["median"] for row in written["rows"]}
    assert found["samples of a hit that are not the miss's"] == 0
    assert found["largest difference of a sample from stock's"] < 1e-5
    assert 0 < found["a voice's state"] < 1
    assert len([what for what in found if what.startswith("first chunk, ")]) == 4
    shown = capsys.readouterr().out
    assert all(what in shown for what in found)
