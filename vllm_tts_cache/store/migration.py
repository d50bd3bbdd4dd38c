"""All that one store has of its voices, in another store: copied, compared, then used.

What is copied is found by comparing the two, in the order of their keys: so it goes on
after any interruption, and notices what changed in the source meanwhile. Each batch is
committed with its rows. Until all was compared nobody else may use the target.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_tts_cache.catalogue import dialect, moves, row_copies
from vllm_tts_cache.catalogue.row_copies import FILES, Rows
from vllm_tts_cache.config import Settings
from vllm_tts_cache.store import migration_ends as ends
from vllm_tts_cache.store.migration_files import FileCopies
from vllm_tts_cache.store.speaker_store import SpeakerStore

# Numbers that no row gets twice.
_NUMBERED = (("speaker", "generation"), ("consent", "number"))
_MAX_PROBLEMS = 100

# What is being done, how much of it is done, and how much there is.
Tell = Callable[[str, int, int], object]


@dataclass(kw_only=True, slots=True)
class Report:
    """What became of a migration.

    Attributes:
        num_copied: Files that this run copied; the others were there.
        was_done: Whether an earlier run had finished it.
        problems: What differs or is wrong in the target; it is done if there are none.
    """

    source: str
    target: str
    num_voices: int = 0
    num_consents: int = 0
    num_files: int = 0
    num_copied: int = 0
    was_done: bool = False
    problems: list[str] = field(default_factory=list[str])


def migrate(source: Settings, target: Settings, tell: Tell) -> Report:
    """Copy a store, or go on with it, and compare the two.

    Raises:
        ConfigError: One of them is in use, or is none that can be migrated (into).
            Nothing was copied.
        StorageError: Something failed; run it again.
    """
    with ends.open_source(source) as one, ends.open_target(target) as other:
        return Migration(one, other, tell).run()


class Migration:
    """One run of it, of two stores that are open."""

    def __init__(self, source: SpeakerStore, target: SpeakerStore, tell: Tell):
        self._source, self._target, self._tell = source, target, tell
        self._databases = source.catalogue.database, target.catalogue.database
        self._files = FileCopies(source, target)
        self._report = Report(
            source=ends.place_of(source), target=ends.place_of(target)
        )

    def run(self) -> Report:
        """Copy, compare, and let the target be used. Raises: as `migrate`."""
        if not self._begin():
            self._copy()
            self._compare()
            if not self._report.problems:
                self._finish()
        self._count()
        return self._report

    def _begin(self) -> bool:
        """Mark the target as half done, unless it is done."""
        move = ends.check_target(self._source, self._target)
        if move is None:
            with self._databases[1].write() as db:
                moves.begin(db, ends.identity(self._source), self._report.source)
        self._report.was_done = move is not None and move.finished_at is not None
        return self._report.was_done

    def _copy(self) -> None:
        num_files, done = FILES.count(self._databases[0]), 0
        for num_seen, num_copied in self._files.copy():
            done += num_seen
            self._report.num_copied += num_copied
            self._tell("copying audio and encodings", done, num_files)
        for rows in row_copies.tables():
            self._copy_rows(rows)
        with self._databases[0].read() as db:
            last = {table: moves.last_number(db, table, c) for table, c in _NUMBERED}
        with self._databases[1].write() as db:
            for table, column in _NUMBERED:
                if last[table]:
                    dialect.raise_sequence(db, table, column, last[table])

    def _copy_rows(self, rows: Rows) -> None:
        num_rows, done = rows.count(self._databases[0]), 0
        for num_seen in row_copies.copy(*self._databases, rows):
            done += num_seen
            self._tell(f"copying {rows.table.name}", done, num_rows)

    def _compare(self) -> None:
        """Hold the two against each other, each file's bytes included."""
        problems = self._report.problems
        for rows in row_copies.tables():
            pairs = rows.pairs(*self._databases)
            if differing := sum(not rows.is_same(pair) for pair in pairs):
                problems.append(
                    f"{rows.table.name}: {differing} rows differ; was the source "
                    "changed meanwhile?"
                )
        num_files, done = FILES.count(self._databases[0]), 0
        for num_seen, wrong in self._files.compare():
            done += num_seen
            problems += wrong[: _MAX_PROBLEMS - len(problems)]
            self._tell("comparing audio and encodings", done, num_files)
        if ends.is_used(self._source):
            problems.append("a server has been started on the source")
        if problems:
            return
        self._tell("verifying the copy", 0, 1)
        self._target.recover()
        problems += self._target.verify()
        self._tell("verifying the copy", 1, 1)

    def _finish(self) -> None:
        with self._databases[1].write() as db:
            moves.finish(db)

    def _count(self) -> None:
        counts = {
            rows.table.name: rows.count(self._databases[1])
            for rows in row_copies.tables()
        }
        self._report.num_voices = counts["speaker"]
        self._report.num_consents = counts["consent"]
        self._report.num_files = FILES.count(self._databases[1])
