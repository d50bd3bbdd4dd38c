"""What each server asks several times a second costs the same for a million voices."""

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import postgresql

from vllm_tts_cache.catalogue import leases

pytestmark = pytest.mark.postgresql


def test_voices_whose_end_has_come_are_found_by_an_index(store):
    query = leases._STANDING.params(participant="none").compile(
        dialect=postgresql.dialect(), compile_kwargs={"literal_binds": True}
    )
    with store.database.write() as db:
        # A table of no rows is read through else.
        db.execute(text("SET LOCAL enable_seqscan = off"))
        plan = db.execute(text(f"EXPLAIN {query}")).scalars().all()
    found = plan.index(next(line for line in plan if "speaker_expiry" in line))
    assert "Index Cond: (expires_at <=" in plan[found + 1]
