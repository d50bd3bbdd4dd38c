"""Until when a participant is waited for, in a catalogue that several machines reach.

By the server's clock alone: those of machines differ. A participant whose lease is over
is not waited for, and is still asked: what it missed waits for it, and it confirms that
when it comes back. After an hour that is deleted, and it joins anew.

That a lease is over says nothing by itself: nobody could renew while the server was
down or frozen, while a standby took its place, or while the network was cut for all;
and a clock that is set forward ends all leases at once. So the catalogue also knows the
series of renewals, by whomsoever: when the last one was, and since when there was no
gap. All of the above is a gap, or looks like one, and ends a series. A participant is
dead, or lost, only if a series has gone on for so long without it, up to this moment:
others renewed all the time, and it alone did not.

Whose turn an encoding is ends at a fixed time, so a holder that died, or could not give
it back, loses it. It saves work and nothing depends on it.
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

RENEW_SECONDS = 2.0
LOST_SECONDS = 3600.0
# After a shorter one everybody has had the time to renew before its lease was over.
GAP_SECONDS = 6.0
# Of the server, because the clocks of machines differ.
NOW: "ColumnElement[float]" = cast(
    func.date_part("epoch", func.clock_timestamp()), Float
)
# The same for a statement that waits for nobody. It is one moment for all of that, so
# that rows which are over are found by an index instead of asking what time it is of
# each: of a million speakers, several times a second.
_ASKED_AT: "ColumnElement[float]" = cast(
    func.date_part("epoch", func.statement_timestamp()), Float
)

_IS_ASKED = (
    exists()
    .where(confirmation.c.deletion_id == deletion.c.id)
    .where(confirmation.c.participant_id == bindparam("participant"))
    .where(deletion.c.files_removed == 1)
)
_STANDING: Any = select(  # of more columns than its type can tell
    lease.c.until - _ASKED_AT,
    lease.c.seconds,
    _IS_ASKED,
    exists().where(deletion.c.files_removed == 0),
    exists().where(speaker.c.expires_at <= _ASKED_AT),
    _ASKED_AT,
).where(lease.c.participant_id == bindparam("participant"))

# An encode that takes longer may be made twice, which costs time only; a holder that
# died holds up no other for longer.
TURN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is new for a participant.

    Attributes:
        seconds: For how long it is waited for, from now on; negative if it is not.
        is_asked: Whether a deletion waits to be confirmed by it.
        is_left: Whether there are deletions whose files are not all removed.
        has_expired: Whether the end of some speaker has come.
    """

    seconds: float
    is_asked: bool = True
    is_left: bool = True
    has_expired: bool = True


def take(db: Connection, participant_id: str, seconds: float) -> None:
    """Wait for the participant from now on, for so long at a time."""
    db.execute(
        lease.insert().values(
            participant_id=participant_id, until=NOW + seconds, seconds=seconds
        )
    )
    _go_on(db)


def renew(db: Connection, participant_id: str) -> bool:
    """Wait for it for longer; False if it has been deleted."""
    where = lease.c.participant_id == participant_id
    renewed = lease.update().where(where).values(until=NOW + lease.c.seconds)
    is_known = db.execute(renewed).rowcount == 1
    if is_known:
        _go_on(db)
    return is_known


def is_known(db: Connection, participant_id: str) -> bool:
    """Whether the participant has not been deleted."""
    where = lease.c.participant_id == participant_id
    return db.execute(select(lease.c.until).where(where)).first() is not None


def alive(db: Connection) -> set[str]:
    """The participants whose leases are not over."""
    query = select(lease.c.participant_id).where(_is_current())
    return set(db.execute(query).scalars())


def awaited(
    query: "Select[Any]", participant_id: "ColumnElement[str]"
) -> "Select[Any]":
    """Of a query's rows, those of participants that are waited for."""
    here = lease.c.participant_id == participant_id
    return query.join(lease, here).where(not_(_is_dead()))


def standing(db: Database, participant_id: str) -> Standing | None:
    """How it stands; None if it was lost. One small question, asked all the time.

    It also sets the catalogue's clock.
    """
    row = db.first_at_once(_STANDING, {"participant": participant_id})
    if row is None:
        return None
    left, seconds, is_asked, is_left, has_expired, now = row
    db.set_now(now)
    return Standing(
        # More is left of one that was taken before the clock was set back.
        seconds=min(left, seconds),
        is_asked=is_asked,
        is_left=is_left,
        has_expired=has_expired,
    )


def end(db: Connection, participant_id: str) -> None:
    """Wait for the participant no longer."""
    db.execute(lease.delete().where(lease.c.participant_id == participant_id))


def lost(db: Connection) -> list[str]:
    """Those that were away for too long."""
    return list(db.execute(select(lease.c.participant_id).where(_is_lost())).scalars())


def end_lost(db: Connection) -> list[str]:
    """End the leases of those; returns whose. Who renews meanwhile keeps it."""
    ended: Delete = lease.delete().where(_is_lost())
    return list(db.execute(ended.returning(lease.c.participant_id)).scalars())


def _go_on(db: Connection) -> None:
    """Count a renewal: it goes on with the series, or begins one after a gap."""
    row = insert(renewals).values(number=1, began_at=NOW, last_at=NOW)
    new, known = row.excluded, renewals.c
    is_gap = func.abs(new.last_at - known.last_at) > GAP_SECONDS
    began_at = case((is_gap, new.last_at), else_=known.began_at)
    db.execute(
        row.on_conflict_do_update(
            index_elements=[known.number],
            set_={"began_at": began_at, "last_at": new.last_at},
        )
    )


def _is_dead() -> "ColumnElement[bool]":
    return and_(not_(_is_current()), _has_gone_on(lease.c.seconds))


def _has_gone_on(seconds: "float | ColumnElement[float]") -> "ColumnElement[bool]":
    """Whether the series of renewals is as old as that, and goes on."""
    # Else nobody renews just now, or the clock was set since the last one.
    goes_on = renewals.c.last_at.between(NOW - GAP_SECONDS, NOW + GAP_SECONDS)
    return exists().where(goes_on, renewals.c.began_at < NOW - seconds)


def _is_current() -> "ColumnElement[bool]":
    # One that ends much later was taken before the clock was set back.
    return lease.c.until.between(NOW, NOW + lease.c.seconds + GAP_SECONDS)


def _is_lost() -> "ColumnElement[bool]":
    is_over = lease.c.until < NOW - LOST_SECONDS
    return and_(is_over, _has_gone_on(lease.c.seconds + LOST_SECONDS))


def take_turn(db: Connection, key_digest: str, holder: str) -> bool:
    """Take the turn, if nobody has it or whoever has it had it for too long."""
    row = {"key_digest": key_digest, "holder": holder, "until": NOW + TURN_SECONDS}
    taken = insert(encode_turn).values(row)
    taken = taken.on_conflict_do_update(
        index_elements=[encode_turn.c.key_digest],
        set_=row,
        # One that ends much later was taken before the clock was set back.
        where=not_(encode_turn.c.until.between(NOW, NOW + TURN_SECONDS + GAP_SECONDS)),
    )
    return db.execute(taken.returning(encode_turn.c.holder)).first() is not None


def give_turn_back(db: Connection, key_digest: str, holder: str) -> None:
    """End a turn."""
    where = encode_turn.c.key_digest == key_digest, encode_turn.c.holder == holder
    db.execute(encode_turn.delete().where(*where))


def delete_dead_turns(db: Connection) -> None:
    """Delete turns of holders that died, which nobody has taken since."""
    db.execute(encode_turn.delete().where(encode_turn.c.until < NOW))
