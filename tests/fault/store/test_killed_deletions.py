"""Kill -9 at every step of a DELETE: another server finishes it, nothing is left."""

from contextlib import closing

import pytest

from tests.fault.killing import carry_out, confirm_all, killed_deleting, open_here
from tests.lease_times import delete_participants
from tests.store_samples import address, publish, register, traces

MIN_STEPS = 20  # fewer, and the child has died of something else


@pytest.mark.parametrize(
    "engine",
    ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)],
    indirect=True,
)
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_delete_that_is_killed_at_any_step_is_finished_by_another(
    directory, engine, is_alone
):
    num_steps, is_killed = 0, True
    while is_killed:
        num_steps += 1
        with closing(open_here(directory)) as other:
            if not is_alone:
                other.join()
            register(other, "Ann")
            publish(other)
            is_killed = killed_deleting(directory, "Ann", num_steps)
            if is_alone:
                other.join()  # a server that is started again
            else:
                waits_for(other, is_deleted=other.find("Ann") is None)
            finish(other)
            if engine == "postgresql":
                delete_participants(other)  # whoever was killed, an hour later
        nothing_is_left(directory)
    assert num_steps > MIN_STEPS


def waits_for(other, *, is_deleted):
    """As long as the other one may remember the voice, nobody is told it is gone."""
    progress = other.progress("Ann")
    if is_deleted:
        assert progress is not None and progress.waiting_for >= 1
    assert is_deleted or progress is None


def finish(other):
    """What a server does in its rounds, and a client that repeats its DELETE."""
    for deletion in other.unfinished_deletions():
        other.remove_files(deletion)
    confirm_all(other)
    if other.find("Ann") is not None:
        carry_out(other, other.delete("Ann"))


def nothing_is_left(directory):
    with closing(open_here(directory)) as store:
        progress = store.progress("Ann")
        if progress is not None:
            assert progress.is_finished, progress
            store.acknowledge(progress.deletion.id)
        assert store.progress("Ann") is None
        assert store.catalogue.num_unfinished_deletions() == 0
        assert store.verify() == []
    assert traces(directory, address()) == []
