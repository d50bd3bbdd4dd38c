"""What leases look like after a time that no test waits for."""

import os
import signal

from sqlalchemy import Connection

from tests.store_samples import opened
from vllm_tts_cache.catalogue import deletions, leases
from vllm_tts_cache.catalogue.schema import lease, renewals
from vllm_tts_cache.config import Settings
from vllm_tts_cache.store.speaker_store import SpeakerStore

# How long others wait for one that says nothing.
SECONDS = Settings().catalogue_grace_seconds


def shorten(store: SpeakerStore, seconds: float) -> None:
    """All who take part are waited for so long only."""
    with store.database.write() as db:
        db.execute(lease.update().values(seconds=seconds, until=leases.NOW + seconds))


def shift(db: Connection, seconds: float) -> None:
    """So much time has passed by the server's clock, or that was set forward."""
    known = renewals.c
    db.execute(lease.update().values(until=lease.c.until - seconds))
    times = {"began_at": known.began_at - seconds, "last_at": known.last_at - seconds}
    db.execute(renewals.update().values(**times))


def silent_for(db: Connection, seconds: float) -> None:
    """All who take part were silent for so long; renewals of others went on."""
    shift(db, seconds)
    db.execute(renewals.update().values(last_at=leases.NOW))


def delete_participants(store: SpeakerStore) -> None:
    """What others do with those that were silent for too long: all who take part."""
    with store.database.write() as db:
        silent_for(db, SECONDS + leases.LOST_SECONDS + 60)
        for participant_id in leases.end_lost(db):
            deletions.leave(db, participant_id)


def delete_and_die(directory, url):
    """Be a server that is killed in the middle of a DELETE; for a new process."""
    store = opened(directory, catalogue_url=url)
    store.participants.join()
    if url:
        shorten(store, 1.0)
    store.registrations.delete("Ann")
    os.kill(os.getpid(), signal.SIGKILL)
