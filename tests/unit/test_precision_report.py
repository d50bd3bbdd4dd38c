import dataclasses
import json
import math
from datetime import datetime, timezone

import numpy as np
import pytest
import torch

from benchmarks import disturbance, precision_report, results
from benchmarks.precision_differences import code_shares, embedding_difference
from benchmarks.precision_report import Measurement

MIB = 2**20
UNMEASURED = Measurement(
    encoder="codec", variant="bfloat16", clip="3 s", family="some", sizes="tiny"
)
MEASURED = UNMEASURED.measured(
    times_ms=[4.0, 1234.5, 1300.0],
    cpu_ms=[3.0, 1000.25, 1100.0],
    was_warm=True,
    peak_bytes=300 * MIB,
    rest_bytes=250 * MIB,
    differences={"first": 0.25, "rest": 0.0},
    is_equal=False,
)
RUN = results.Run(
    began=datetime(2026, 1, 2, tzinfo=timezone.utc),
    revision="abc",
    is_dirty=True,
    machine={"device": "a chip"},
    versions={},
    settings={},
    rows=(),
)


def test_the_first_codebook_is_counted_apart_from_all_others():
    expected = np.zeros((4, 3), np.int16)
    given = expected.copy()
    given[1, 0] = 7
    given[:, 2] = 7
    given[3, 1] = 7
    assert code_shares(given, expected) == (0.25, 5 / 8)
    assert code_shares(expected, expected) == (0.0, 0.0)


def test_codes_of_another_length_are_no_difference_but_an_error():
    with pytest.raises(ValueError, match="shape"):
        code_shares(np.zeros((4, 3)), np.zeros((5, 3)))


def test_a_longer_embedding_of_the_same_direction_differs_but_not_by_its_cosine():
    one = np.array([0.6, 0.8, 0.0], np.float32)
    assert embedding_difference(2 * one, one) == pytest.approx(
        {"max abs": 0.8, "1-cos": 0.0}, abs=1e-7
    )


@pytest.mark.parametrize("angle", [1e-6, 1e-3, 1.0, math.pi / 2])
def test_the_cosine_of_nearly_equal_embeddings_keeps_its_digits(angle):
    one = np.array([1.0, 0.0])
    other = np.array([math.cos(angle), math.sin(angle)])
    found = embedding_difference(one, other)["1-cos"]
    assert found == pytest.approx(2 * math.sin(angle / 2) ** 2, rel=1e-6, abs=0)


def test_a_row_shows_medians_memory_and_shares_in_percent():
    assert precision_report.cells(MEASURED) == (
        "some codec, tiny",
        "bfloat16",
        "3 s",
        "1,234.5",
        "1,000.2",
        "300",
        "50",
        "first 25.0 %, rest 0.0 %",
        "no",
    )


def test_a_single_run_is_said_to_be_a_cold_one():
    cold = dataclasses.replace(MEASURED, times_ms=[9.0], was_warm=False)
    assert "9.0 (cold)" in precision_report.cells(cold)


def test_distances_between_embeddings_are_no_percentages():
    row = MEASURED.measured(differences={"max abs": 0.0125, "1-cos": 3e-9})
    assert "max abs 0.013, 1-cos 3e-09" in precision_report.cells(row)


def test_a_row_that_was_not_measured_says_why_and_has_no_figure():
    row = UNMEASURED.without("needs CUDA")
    shown = precision_report.cells(row)
    assert shown[3] == "not measured: needs CUDA"
    assert set(shown[4:]) == {""}
    with pytest.raises(ValueError, match="needs CUDA"):
        _ = row.median_ms


def test_every_row_of_the_table_has_a_cell_under_each_heading():
    table = precision_report.rich_table([MEASURED, UNMEASURED.without("slow")])
    assert table.row_count == 2
    assert {len(precision_report.cells(row)) for row in (MEASURED, UNMEASURED)} == {
        len(table.columns)
    }


def test_the_file_says_what_was_not_measured_and_leaves_its_figures_out(tmp_path):
    path = tmp_path / precision_report.file_name(RUN)
    rows = [MEASURED, UNMEASURED.without("needs CUDA")]
    precision_report.save(RUN, rows, {}, path)
    assert path.name == "2026-01-02-abc-dirty-precision.json"
    saved = json.loads(path.read_text())
    assert saved["machine"]["device"] == "a chip"
    assert saved["disturbance"] == "not measured: needs CUDA"
    measured, unmeasured = saved["rows"]
    assert (measured["median_ms"], measured["is_equal"]) == (1234.0, False)
    assert unmeasured["not_measured"] == "needs CUDA"
    assert not {"times_ms", "median_ms", "differences"} & unmeasured.keys()


def test_the_disturbance_is_saved_by_encoder(tmp_path):
    found = disturbance.summary("alone", [1.0] * 99 + [101.0], num_encodes=0)
    assert found.p50_ms == 1.0
    assert found.p99_ms == pytest.approx(2.0)
    precision_report.save(RUN, [], {"codec": [found]}, tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())["disturbance"]
    assert saved == {"codec": [dataclasses.asdict(found)]}
    assert precision_report.disturbance_table([found]).row_count == 1


def test_a_loop_without_a_step_has_no_percentile():
    with pytest.raises(ValueError, match="alone"):
        disturbance.summary("alone", [], num_encodes=0)


def test_the_decode_like_step_reads_its_input_and_its_cache_and_draws_nothing_anew():
    step = disturbance.DecodeStep(
        num_layers=2, hidden=32, num_heads=2, num_streams=3, num_cached=5
    )
    hidden = torch.randn(step.input_shape)
    with torch.no_grad():
        before = step(hidden)
        assert before.shape == hidden.shape == (3, 32)
        assert torch.equal(step(hidden), before)
        assert not torch.equal(step(2 * hidden), before)
        for name, buffer in step.named_buffers():
            if name.endswith("values"):
                buffer.zero_()
        assert not torch.equal(step(hidden), before)
