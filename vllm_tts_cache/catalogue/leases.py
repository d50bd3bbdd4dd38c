"""Leases of participants and turns to encode, if several machines reach the catalogue.

All times are by the server's clock: those of machines differ. Deletions do not wait for
a participant whose lease is over, but keep its confirmations: it confirms them when it
comes back. After an hour more they are deleted, and it joins anew.

An expired lease alone proves nothing: no participant can renew while the server is down
or frozen, while a standby takes its place, or while the network is cut for all; and a
clock that is set forward ends all leases at once. So the row of ``renewals`` tracks the
series of renewals by all participants: when the last one was, and since when there was
no gap. Each of these events is a gap, or looks like one, and ends the series. A
participant is dead (lease over) or lost (an hour more) only if a series has lasted that
long up to now: others renewed all the time, and it alone did not.

A turn to encode a key ends at a fixed time, so a holder that died, or could not give it
back, loses it. Turns save work; nothing depends on them.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
    Float,
    Select,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    literal_column,
    not_,
    select,
)
from sqlalchemy.dialects.postgresql import insert

from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.schema import (
    confirmation,
    deletion,
    encode_turn,
    lease,
    renewals,
    speaker,
)

RENEW_SECONDS = 1.0
LOST_SECONDS = 3600.0
# After a shorter gap every participant has had time to renew before its lease ended.
GAP_SECONDS = 6.0
# The server's clock, because those of machines differ.
NOW: "ColumnElement[float]" = cast(
    func.date_part("epoch", func.clock_timestamp()), Float
)
# The same for a statement that waits for no lock. It is one moment for the whole
# statement, so that an index finds what is over: `NOW` is computed for each row, of a
# million speakers, several times a second. Its unit is no parameter: the plan that the
# server keeps for all parameters would expect every third speaker to have expired, and
# read all of them to find the first.
_ASKED_AT: "ColumnElement[float]" = cast(
    func.date_part(literal_column("'epoch'"), func.statement_timestamp()), Float
)

_STARTED_AT: "ColumnElement[float]" = cast(
    func.date_part(literal_column("'epoch'"), func.pg_postmaster_start_time()), Float
)

_IS_ASKED = exists().where(
    confirmation.c.deletion_id == deletion.c.id,
    confirmation.c.participant_id == bindparam("participant"),
    deletion.c.files_removed == 1,
)
_STANDING: Any = select(  # more columns than its type can express
    lease.c.until - _ASKED_AT,
    lease.c.seconds,
    _IS_ASKED,
    exists().where(deletion.c.files_removed == 0),
    exists().where(speaker.c.expires_at <= _ASKED_AT),
    _ASKED_AT,
    _STARTED_AT,
).where(lease.c.participant_id == bindparam("participant"))

# An encode that takes longer may be made twice, which costs time only; a holder that
# died holds up no other for longer.
TURN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Standing:
    """A participant's lease, and what there is to do for it.

    Attributes:
        seconds: What is left of its lease; negative if it is over.
        is_asked: Whether a deletion waits for its confirmation.
        has_files_left: Whether there are deletions whose files are not all removed.
        has_expired: Whether a speaker has passed its ``expires_at``.
        epoch: When the database's server started. With another one, a failover may
            have lost what was committed last.
    """

    seconds: float
    is_asked: bool = True
    has_files_left: bool = True
    has_expired: bool = True
    epoch: float = 0.0


def take(db: Connection, participant_id: str, seconds: float) -> None:
    """Insert a participant's lease, which lasts ``seconds`` from each renewal."""
    row = {"participant_id": participant_id, "seconds": seconds}
    db.execute(lease.insert().values(**row, until=NOW + seconds))
    _go_on(db)


def renew(db: Connection, participant_id: str) -> bool:
    """Renew a participant's lease; False if the lease has been deleted."""
    where = lease.c.participant_id == participant_id
    renewed = lease.update().where(where).values(until=NOW + lease.c.seconds)
    if db.execute(renewed).rowcount == 0:
        return False
    _go_on(db)
    return True


def is_known(db: Connection, participant_id: str) -> bool:
    """Whether the participant has a lease, over or not."""
    where = lease.c.participant_id == participant_id
    return db.execute(select(lease.c.until).where(where)).first() is not None


def alive(db: Connection) -> set[str]:
    """Return the participants whose leases are not over."""
    query = select(lease.c.participant_id).where(_is_current())
    return set(db.execute(query).scalars())


def awaited(
    query: "Select[Any]", participant_id: "ColumnElement[str]"
) -> "Select[Any]":
    """Limit a query's rows to those of participants that are not dead."""
    here = lease.c.participant_id == participant_id
    is_dead = and_(not_(_is_current()), _has_gone_on(lease.c.seconds))
    return query.join(lease, here).where(not_(is_dead))


def standing(db: Database, participant_id: str) -> Standing | None:
    """Return a participant's standing by one small query; None if it has no lease.

    It also sets the clock of `Database.now`.
    """
    row = db.first_at_once(_STANDING, {"participant": participant_id})
    if row is None:
        return None
    left, seconds, is_asked, has_files_left, has_expired, now, epoch = row
    db.set_now(now)
    # More is left of a lease that was taken before the clock was set back.
    left = min(left, seconds)
    return Standing(left, is_asked, has_files_left, has_expired, epoch)


def end(db: Connection, participant_id: str) -> None:
    """Delete the participant's lease."""
    db.execute(lease.delete().where(lease.c.participant_id == participant_id))


def lost(db: Connection) -> list[str]:
    """Return the ids of participants that are lost."""
    return list(db.execute(select(lease.c.participant_id).where(_is_lost())).scalars())


def end_lost(db: Connection) -> list[str]:
    """Delete lost participants' leases, unless renewed meanwhile; return their ids."""
    ended: Delete = lease.delete().where(_is_lost())
    return list(db.execute(ended.returning(lease.c.participant_id)).scalars())


def _go_on(db: Connection) -> None:
    """Add a renewal to the series; after a gap it begins a new one."""
    row = insert(renewals).values(number=1, began_at=NOW, last_at=NOW)
    new, known = row.excluded, renewals.c
    is_gap = func.abs(new.last_at - known.last_at) > GAP_SECONDS
    began_at = case((is_gap, new.last_at), else_=known.began_at)
    again = {"began_at": began_at, "last_at": new.last_at}
    db.execute(row.on_conflict_do_update(index_elements=[known.number], set_=again))


def _has_gone_on(seconds: "float | ColumnElement[float]") -> "ColumnElement[bool]":
    """Whether the series of renewals is that old, and still goes on."""
    # Else no participant renews now, or the clock was set since the last renewal.
    goes_on = renewals.c.last_at.between(NOW - GAP_SECONDS, NOW + GAP_SECONDS)
    return exists().where(goes_on, renewals.c.began_at < NOW - seconds)


def _is_current() -> "ColumnElement[bool]":
    # A lease that ends much later was taken before the clock was set back.
    return lease.c.until.between(NOW, NOW + lease.c.seconds + GAP_SECONDS)


def _is_lost() -> "ColumnElement[bool]":
    is_over = lease.c.until < NOW - LOST_SECONDS
    return and_(is_over, _has_gone_on(lease.c.seconds + LOST_SECONDS))


def take_turn(db: Connection, key_digest: str, holder: str) -> bool:
    """Take the turn to encode a key; False if a turn is held and not yet over."""
    row = {"key_digest": key_digest, "holder": holder, "until": NOW + TURN_SECONDS}
    taken = insert(encode_turn).values(row)
    taken = taken.on_conflict_do_update(
        index_elements=[encode_turn.c.key_digest],
        set_=row,
        # A turn that ends much later was taken before the clock was set back.
        where=not_(encode_turn.c.until.between(NOW, NOW + TURN_SECONDS + GAP_SECONDS)),
    )
    return db.execute(taken.returning(encode_turn.c.holder)).first() is not None


def give_turn_back(db: Connection, key_digest: str, holder: str) -> None:
    """Delete a holder's turn."""
    where = encode_turn.c.key_digest == key_digest, encode_turn.c.holder == holder
    db.execute(encode_turn.delete().where(*where))


def delete_dead_turns(db: Connection) -> None:
    """Delete turns that are over, which holders that died leave behind."""
    db.execute(encode_turn.delete().where(encode_turn.c.until < NOW))
