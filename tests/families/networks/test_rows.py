"""Where a reference stands, on its way to the worker."""

import pytest

from vllm_tts_cache.families.networks.rows import FIELD, ReferenceRows


def test_the_wire_of_the_positions_is_checked():
    rows = ReferenceRows.behind([7] * 12, 646)
    assert (rows.start, rows.num_rows) == (12, 646)
    assert ReferenceRows.from_info({FIELD: rows.to_wire()}) == rows
    for wrong in (None, [1, 2], [1, -2, 3], ["1", 2, 3], 7, [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="three counts"):
            ReferenceRows.from_info({FIELD: wrong})
