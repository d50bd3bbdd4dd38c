"""Tiny checkpoints of any family, with random weights: they are no models."""

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.files import PARTIAL_PREFIX, storage_errors
from vllm_tts_cache.speaker.family import Family

Report = Callable[[str], None]

_README = """\
Random weights, not a model.

This directory has the layout of a released {title} checkpoint, so that a server can be
started and tested without a download. What it speaks is noise. It was written by
`vllm-tts-cache make-checkpoint`; nothing in it was taken from a released checkpoint.
The options are in {marker}.
"""

# A directory that holds this file was written by test equipment.
MARKER = ".random-weights.json"

EncoderSize = Literal["tiny", "real"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """Options of every family's checkpoint; equal options give equal bytes.

    With ``real`` the reference encoders have their released sizes.
    """

    encoders: EncoderSize = "tiny"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSizes:
    """Sizes of one stack of decoder layers."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def config(self) -> dict[str, Any]:
        """Fields of a ``config.json``, as transformers names them, but ``head_dim``."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
        }


class TinyCheckpoint:
    """A family's tiny checkpoint, before or after it is written."""

    def __init__(self, family: Family, **options: Any):
        self.family = family
        self.options: Any = family.part("tiny_options")(**options)

    @property
    def marker(self) -> dict[str, Any]:
        """The content of the directory's `MARKER`."""
        return {"family": self.family.name, **dataclasses.asdict(self.options)}

    def ensure(self, path: Path, report: Report = lambda _step: None) -> Path:
        """Write the checkpoint unless an equal one is at ``path``.

        Raises: ConfigError, StorageError.
        """
        with suppress(OSError, ValueError):
            if json.loads((path / MARKER).read_text()) == self.marker:
                return path
        return self.write(path, report, force=True)

    def write(
        self, out: Path, report: Report = lambda _step: None, *, force: bool = False
    ) -> Path:
        """Write the checkpoint to ``out`` and return ``out``.

        Args:
            out: A directory that is absent or empty.
            report: Called with the name of each step as it begins.
            force: Replace a checkpoint that was written there before.

        Raises:
            ConfigError: ``out`` must not be overwritten.
            StorageError: The disk failed. Nothing half-written stays behind.
        """
        # A relative path may be "." or end in "..", which has no sibling to rename.
        path = Path(os.path.abspath(out))  # noqa: PTH100
        _check_replaceable(path, force)
        partial = path.with_name(f"{PARTIAL_PREFIX}{path.name}-{uuid.uuid4().hex}")
        try:
            with storage_errors(path):
                partial.mkdir(parents=True)
                self.family.part("tiny_part")(partial, self.options, report)
                (partial / MARKER).write_text(json.dumps(self.marker, indent=2) + "\n")
                readme = _README.format(title=self.family.title, marker=MARKER)
                (partial / "README.txt").write_text(readme)
                if path.is_dir():  # a directory cannot be renamed over a full one
                    shutil.rmtree(path)
                partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return out


def serve_arguments(family: Family) -> tuple[str, ...]:
    """Return the arguments of ``vllm serve`` after the checkpoint, on a CPU."""
    assert family.deploy_file is not None
    return ("--omni", "--deploy-config", str(family.deploy_file))


def _check_replaceable(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise ConfigError(f"--out {out}: is no directory; choose another name")
    if not any(out.iterdir()):
        return
    if not (out / MARKER).is_file():
        raise ConfigError(
            f"--out {out}: is not empty and was not written by this command, so it is "
            "left alone; choose another directory"
        )
    if not force:
        raise ConfigError(f"--out {out}: holds a test checkpoint; --force replaces it")
