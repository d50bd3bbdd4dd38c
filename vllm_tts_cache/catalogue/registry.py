"""Who is registered under which name."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from vllm_tts_cache.catalogue import imports, rows
from vllm_tts_cache.catalogue.imports import ImportedFile
from vllm_tts_cache.catalogue.names import fold, is_storable
from vllm_tts_cache.catalogue.record import (
    DEFAULT_TENANT,
    NewSpeaker,
    Registered,
    SpeakerRecord,
)
from vllm_tts_cache.catalogue.rows import Page
from vllm_tts_cache.catalogue.sqlite import Database
from vllm_tts_cache.config import RegistrationPolicy
from vllm_tts_cache.errors import (
    InvalidSpeakerError,
    SpeakerExistsError,
    SpeakerLimitError,
)

_NAMES_PER_READ = 1000

# The method of this name hides the builtin in the class below.
SpeakerPage = list[SpeakerRecord]


class Registry:
    """Speakers by tenant and name, in one file that several processes share.

    Every method may be called from any thread, and raises StorageError if the file
    fails. What returns has been committed.

    Args:
        path: The SQLite file; it and its directory are made if missing.
        max_speakers: Speakers at most, all tenants together; 0 means no limit.
        policy: Whether registering may take over a name (``overwrite``) or not
            (``immutable``).
    """

    def __init__(self, path: Path, *, max_speakers: int, policy: RegistrationPolicy):
        self._database = Database(path)
        self._max_speakers = max_speakers
        self._policy: RegistrationPolicy = policy

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self._database.path

    def register(self, new: NewSpeaker) -> Registered:
        """Register a speaker; readers see the old row until they see the new one.

        Raises:
            SpeakerExistsError: The name is taken and the policy is ``immutable``.
            SpeakerLimitError: The name is new and the registry is full.
            StorageFullError: There is no space left; nothing was changed.
        """
        with self._database.write() as db:
            replaced = rows.find(db, new.tenant, new.name_key)
            if replaced is not None and self._policy == "immutable":
                raise SpeakerExistsError(replaced.name)
            if replaced is None and self._is_full(db):
                raise SpeakerLimitError(self._max_speakers)
            record = rows.replace(db, new)
        return Registered(record=record, replaced=replaced)

    def get(self, name: str, tenant: str = DEFAULT_TENANT) -> SpeakerRecord | None:
        """The speaker of that name, compared folded. One indexed read."""
        if not is_storable(name):
            return None
        with self._database.read() as db:
            return rows.find(db, tenant, fold(name))

    def get_at_once(
        self, name: str, tenant: str = DEFAULT_TENANT
    ) -> SpeakerRecord | None:
        """As `get`, for a caller that must not wait for a lock: that is an error."""
        if not is_storable(name):
            return None
        with self._database.read_at_once() as db:
            return rows.find(db, tenant, fold(name))

    def speaker_embedding(self, record: SpeakerRecord) -> tuple[float, ...] | None:
        """The registered embedding, float32 values of shape ``(embedding_dim,)``.

        None if the speaker has audio, or was replaced or deleted in the meantime.
        """
        with self._database.read() as db:
            return rows.embedding(db, record.generation)

    def delete(self, name: str, tenant: str = DEFAULT_TENANT) -> SpeakerRecord | None:
        """Remove a speaker and return what was removed; None if there was none.

        A file of stock vLLM-Omni with this name does not bring it back.
        """
        if not is_storable(name):
            return None
        with self._database.write() as db:
            deleted = rows.find(db, tenant, fold(name))
            if deleted is not None:
                rows.delete(db, tenant, deleted.name_key)
                if tenant == DEFAULT_TENANT:
                    imports.mark_deleted(db, deleted.name_key)
        return deleted

    def count(self, tenant: str = DEFAULT_TENANT) -> int:
        """How many speakers the tenant has; reads an index once through."""
        with self._database.read() as db:
            query = "SELECT count(*) FROM speaker WHERE tenant = ?"
            return db.execute(query, (tenant,)).fetchone()[0]

    def names(
        self,
        *,
        limit: int,
        after: str = "",
        search: str = "",
        tenant: str = DEFAULT_TENANT,
    ) -> list[str]:
        """The names of `list`'s page, for less."""
        where = _page(tenant, limit, after, search)
        with self._database.read() as db:
            return [name for name, _ in rows.names(db, where)]

    def iter_names(self, tenant: str = DEFAULT_TENANT) -> Iterator[str]:
        """All names in order; holds no connection while the caller thinks.

        A speaker that comes or goes meanwhile may or may not be among them.
        """
        after = ""
        while True:
            with self._database.read() as db:
                where = Page(tenant=tenant, after=after, limit=_NAMES_PER_READ)
                found = rows.names(db, where)
            yield from (name for name, _ in found)
            if len(found) < _NAMES_PER_READ:
                return
            after = found[-1][1]

    def references(self, audio_sha256: str) -> int:
        """How many speakers of all tenants use this audio."""
        with self._database.read() as db:
            query = "SELECT count(*) FROM speaker WHERE audio_sha256 = ?"
            return db.execute(query, (audio_sha256,)).fetchone()[0]

    def referenced_audio(self) -> set[str]:
        """The ``audio_sha256`` of all speakers of all tenants, at one moment."""
        with self._database.read() as db:
            query = """
                SELECT DISTINCT audio_sha256 FROM speaker
                WHERE audio_sha256 IS NOT NULL
            """
            return {audio_sha256 for (audio_sha256,) in db.execute(query)}

    def verify(self) -> list[str]:
        """What is wrong with the file or its rows, one line each; reads it all."""
        with self._database.read() as db:
            return rows.problems(db)

    def imported_files(self) -> dict[str, tuple[int, int]]:
        """Files that were looked at: name -> (modification time in ns, bytes)."""
        with self._database.read() as db:
            return imports.known(db)

    def import_refusal(self, name: str, created_at: float) -> str | None:
        """Why a file's speaker would not be imported, None if it would be."""
        with self._database.read() as db:
            return imports.refusal(db, fold(name), created_at, self._policy)

    def import_speaker(self, new: NewSpeaker, file: ImportedFile) -> str | None:
        """Register a file's speaker and remember the file, or say why not.

        The limit does not apply: what stock vLLM-Omni kept is not lost because
        more was kept than may be added now.
        """
        with self._database.write() as db:
            refusal = imports.refusal(db, file.name_key, file.created_at, self._policy)
            if refusal is None:
                rows.replace(db, new)
                imports.remember(db, file)
        return refusal

    def remember_files(self, files: list[ImportedFile]) -> None:
        """Do not look at these files again, unless they change."""
        with self._database.write() as db:
            for file in files:
                imports.remember(db, file)

    def close(self) -> None:
        """Close every connection; using the registry afterwards is an error."""
        self._database.close()

    def __enter__(self) -> "Registry":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def list(
        self,
        *,
        limit: int,
        after: str = "",
        search: str = "",
        tenant: str = DEFAULT_TENANT,
    ) -> SpeakerPage:
        """A page of speakers in the order of their folded names.

        Args:
            limit: Speakers at most; positive.
            after: A name; the page begins behind it, registered or not.
            search: Only names that contain this, both folded.
            tenant: Whose speakers.

        Raises:
            InvalidSpeakerError: ``limit`` is not positive, or a text is no text.
        """
        where = _page(tenant, limit, after, search)
        with self._database.read() as db:
            return rows.page(db, where)

    def _is_full(self, db: sqlite3.Connection) -> bool:
        return self._max_speakers > 0 and rows.at_least(db, self._max_speakers)


def _page(tenant: str, limit: int, after: str, search: str) -> Page:
    if limit <= 0:
        raise InvalidSpeakerError("limit", "it must be positive")
    for field, text in (("after", after), ("search", search)):
        if not is_storable(text):
            raise InvalidSpeakerError(field, "it contains an unpaired surrogate")
    return Page(tenant=tenant, after=fold(after), search=fold(search), limit=limit)
