"""What is written beside a line of the dashboard's picture."""

import pytest

from benchmarks.dashboard import label_of


@pytest.mark.parametrize(
    ("legend", "labels", "shown"),
    [
        (
            "{{tier}}, {{segment}}",
            {"tier": "disk", "segment": "inline"},
            "disk, inline",
        ),
        (
            "refused: {{reason}} ({{fault}})",
            {"reason": "Bad", "fault": "client"},
            "refused: Bad (client)",
        ),
        ("refused: {{reason}} ({{fault}})", {}, "refused"),
        ("{{reason}} ({{fault}})", {}, ""),
        ("hits", {"tier": "disk"}, "hits"),
    ],
)
def test_a_legend_shows_no_label_that_a_series_lacks(legend, labels, shown):
    assert label_of(legend, labels) == shown
