"""Turns by key among the machines of a fleet, each a lease in the catalogue."""

import logging
import secrets
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress

from vllm_tts_cache.catalogue import encode_turns
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.throttled_log import ThrottledLog


class LeasedTurns:
    """As `locks.KeyTurns`, in a catalogue that several machines reach."""

    # Each look is two questions to a server, which a fleet asks.
    look_again_seconds = 0.5

    def __init__(self, database: Database):
        self._database = database
        self._holder = secrets.token_hex(8)
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def try_take(self, key: EncodingKey) -> AbstractContextManager[None] | None:
        """The key's turn, until the context ends; None if another has it now.

        Raises:
            StorageError: The catalogue cannot be asked.
        """
        with self._database.alone() as db:
            if not encode_turns.try_take(db, key.digest, self._holder):
                return None
        return self._kept(key.digest)

    @contextmanager
    def _kept(self, key_digest: str) -> Generator[None, None, None]:
        done = threading.Event()
        keeper = threading.Thread(
            target=self._keep, args=(done,), name="tts-cache-turn", daemon=True
        )
        keeper.start()
        try:
            yield
        finally:
            done.set()
            with suppress(StorageError), self._database.alone() as db:
                encode_turns.give_back(db, key_digest, self._holder)

    def _keep(self, done: threading.Event) -> None:
        while not done.wait(encode_turns.RENEW_SECONDS):
            try:
                with self._database.alone() as db:
                    encode_turns.renew(db, self._holder)
            except StorageError as exc:
                self._log.warn_of("a turn", "A turn to encode: %s", exc.log_text)
