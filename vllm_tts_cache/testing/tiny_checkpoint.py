"""Tiny checkpoints with random weights, whatever the family. Not models."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.testing.directories import MARKER, new_directory

Report = Callable[[str], None]

_README = """\
Random weights, not a model.

This directory has the layout of a released {title} checkpoint, so that a server can be
started and tested without a download. What it speaks is noise. It was written by
`vllm-tts-cache make-checkpoint`; nothing in it was taken from a released checkpoint.
The options are in {marker}.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyWriter:
    """A family's part that writes its tiny checkpoints.

    Attributes:
        options: The default ones, a frozen dataclass; ``encoders`` and ``seed`` are
            always among them. Equal ones give byte-identical files.
        write: Fills an empty directory; called with the options, and with what to
            call as each step begins.
    """

    options: Any
    write: Callable[[Path, Any, Report], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyCheckpoint:
    """What a family's tiny checkpoint is to be."""

    family: Family
    options: Any

    @classmethod
    def of(cls, family: Family, **options: Any) -> "TinyCheckpoint":
        """Return a family's, with some options changed.

        Raises: ConfigError if an option cannot be used.
        """
        writer: TinyWriter = family.part("tiny_part")
        changed = dataclasses.replace(writer.options, **options)
        return cls(family=family, options=changed)

    @property
    def marker(self) -> dict[str, Any]:
        """What the directory says of itself."""
        return {"family": self.family.name, **dataclasses.asdict(self.options)}

    def ensure(self, path: Path, report: Report = lambda _step: None) -> Path:
        """Write it unless an equal one is there.

        Raises: ConfigError, StorageError.
        """
        if _written_marker(path) != self.marker:
            self.write(path, report, force=True)
        return path

    def write(
        self, out: Path, report: Report = lambda _step: None, *, force: bool = False
    ) -> Path:
        """Write it to ``out`` and return ``out``.

        Args:
            out: A directory that is absent or empty.
            report: Called with the name of each step as it begins.
            force: Replace a checkpoint that was written there before.

        Raises:
            ConfigError: ``out`` must not be overwritten.
            StorageError: The disk failed. Nothing half-written stays behind.
        """
        writer: TinyWriter = self.family.part("tiny_part")
        with new_directory(out, force=force) as directory:
            writer.write(directory, self.options, report)
            (directory / MARKER).write_text(json.dumps(self.marker, indent=2) + "\n")
            readme = _README.format(title=self.family.title, marker=MARKER)
            (directory / "README.txt").write_text(readme)
        return out


def serve_arguments(family: Family) -> tuple[str, ...]:
    """Return what ``vllm serve`` is given beside the checkpoint, on a CPU."""
    assert family.deploy_file is not None
    return ("--omni", "--deploy-config", str(family.deploy_file))


def _written_marker(path: Path) -> object:
    try:
        return json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return None
