"""Whose turn an encoding is among the machines of a fleet; the caller has a connection.

A turn ends with its holder's lease, by the server's clock: a holder that died, or was
cut off, loses it. It saves work and nothing depends on it.
"""

from sqlalchemy import Connection
from sqlalchemy.dialects.postgresql import insert

from vllm_tts_cache.catalogue.leases import NOW
from vllm_tts_cache.catalogue.schema import encode_turn

LEASE_SECONDS = 15.0
RENEW_SECONDS = 4.0


def try_take(db: Connection, key_digest: str, holder: str) -> bool:
    """Take the turn, if nobody has it or whoever had it is dead."""
    until = NOW + LEASE_SECONDS
    row = {"key_digest": key_digest, "holder": holder}
    taken = insert(encode_turn).values(**row, until=until)
    taken = taken.on_conflict_do_update(
        index_elements=[encode_turn.c.key_digest],
        set_={"holder": holder, "until": until},
        where=encode_turn.c.until < NOW,
    )
    return db.execute(taken.returning(encode_turn.c.holder)).first() is not None


def renew(db: Connection, holder: str) -> None:
    """Keep all that the holder has for longer."""
    where = encode_turn.c.holder == holder
    db.execute(encode_turn.update().where(where).values(until=NOW + LEASE_SECONDS))


def give_back(db: Connection, key_digest: str, holder: str) -> None:
    """End a turn."""
    where = encode_turn.c.key_digest == key_digest, encode_turn.c.holder == holder
    db.execute(encode_turn.delete().where(*where))


def delete_dead(db: Connection) -> None:
    """Delete turns of holders that died, which nobody has taken since."""
    db.execute(encode_turn.delete().where(encode_turn.c.until < NOW - LEASE_SECONDS))
