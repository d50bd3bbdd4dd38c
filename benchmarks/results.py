"""Results as one JSON file per run, named by day and revision."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, Summary
from vllm_tts_cache.files import publish

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that one run says, and on what it was measured."""

    began: datetime
    revision: str
    is_dirty: bool
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def file_name(self) -> str:
        dirty = "-dirty" if self.is_dirty else ""
        return f"{self.began:%Y-%m-%d}-{self.revision}{dirty}.json"

    def plain(self) -> dict[str, Any]:
        """As JSON types; no name of a host or a directory is in it."""
        return {
            "format": FORMAT_VERSION,
            "began": self.began.isoformat(timespec="seconds"),
            "revision": self.revision,
            "dirty": self.is_dirty,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "rows": [_plain_row(row) for row in self.rows],
        }


def save(run: Run, directory: Path) -> Path:
    """Write the run whole; a run of the same day and revision is replaced.

    Raises: StorageError.
    """
    path = directory / run.file_name
    # A row a line: readable, and a diff of two runs shows what moved.
    plain = run.plain()
    rows = ",\n".join("  " + json.dumps(row) for row in plain.pop("rows"))
    head = json.dumps(plain, indent=1).removesuffix("\n}")
    publish(path, f'{head},\n "rows": [\n{rows}\n ]\n}}\n'.encode())
    return path


def _plain_row(row: Row) -> dict[str, Any]:
    return {
        "scenario": row.scenario,
        "model": row.model,
        "what": row.what,
        "unit": row.unit,
        "note": row.note,
        "ours": _plain_summary(row.ours),
        "versus": None if row.reference is None else row.versus,
        "reference": None if row.reference is None else _plain_summary(row.reference),
        "ratio": None if row.ratio is None else _short(row.ratio),
        "target": None if row.target is None else str(row.target),
        "met": row.is_met,
    }


def _plain_summary(summary: Summary) -> dict[str, Any]:
    return {
        "median": _short(summary.median),
        "iqr": _short(summary.iqr),
        "samples": [_short(value) for value in summary.samples],
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 10_000 else round(value)
