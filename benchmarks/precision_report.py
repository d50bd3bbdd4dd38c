"""What a precision run hands back: measurements, as a table and as JSON."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.disturbance import Disturbance
from benchmarks.results import Run
from vllm_tts_cache.files import publish

_MIB = 2**20
_HEADINGS = (
    "encoder",
    "variant",
    "clip",
    "time, ms",
    "CPU, ms",
    "peak, MiB",
    "above rest",
    "differs from float32",
    "bit-equal",
)
_NUM_LEFT = 3  # columns of text


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One variant of one encoder on one clip.

    Attributes:
        sizes: Of the reference encoders: tiny or real.
        times_ms: Of the whole batch; empty if it was not measured.
        cpu_ms: What the process had of the CPU meanwhile, all threads together; on a
            busy machine it says more than the time.
        was_warm: Whether a run came before the first of them.
        peak_bytes: Resident memory of the process, or what torch had allocated on
            the GPU; ``rest_bytes`` before the first run, the network included.
        differences: What is counted -> how much of it is not as in float32.
        is_equal: Whether all of it is the same to the bit.
        not_measured: Why not; empty if it was.
    """

    encoder: str
    variant: str
    clip: str
    family: str = ""
    sizes: str = ""
    times_ms: Sequence[float] = ()
    cpu_ms: Sequence[float] = ()
    was_warm: bool = False
    peak_bytes: int = 0
    rest_bytes: int = 0
    differences: Mapping[str, float] = field(default_factory=dict)
    is_equal: bool | None = None
    not_measured: str = ""

    def without(self, reason: str) -> "Measurement":
        return dataclasses.replace(self, not_measured=reason)

    def measured(self, **found: Any) -> "Measurement":
        return dataclasses.replace(self, **found)

    @property
    def median_ms(self) -> float:
        """Raises: ValueError if it was not measured."""
        if not self.times_ms:
            raise ValueError(f"not measured: {self.not_measured}")
        return float(np.median(self.times_ms))


def rich_table(rows: Sequence[Measurement]) -> Table:
    """All rows, a rule between encoders; one that was not measured says why."""
    caption = "medians, of the whole batch; memory with the network and the process"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, pad_edge=False)
    for heading in _HEADINGS:
        justify = "left" if heading in _HEADINGS[:_NUM_LEFT] else "right"
        table.add_column(heading, justify=justify)
    last = None
    for row in rows:
        if last not in (None, _encoder(row)):
            table.add_section()
        table.add_row(*cells(row))
        last = _encoder(row)
    return table


def cells(row: Measurement) -> tuple[str, ...]:
    head = (_encoder(row), row.variant, row.clip)
    if not row.times_ms:
        return *head, f"not measured: {row.not_measured}", *[""] * 5
    cold = "" if row.was_warm else " (cold)"
    return (
        *head,
        f"{row.median_ms:,.1f}{cold}",
        f"{np.median(row.cpu_ms):,.1f}",
        f"{row.peak_bytes / _MIB:,.0f}",
        f"{(row.peak_bytes - row.rest_bytes) / _MIB:,.0f}",
        ", ".join(_difference(*item) for item in row.differences.items()),
        "yes" if row.is_equal else "no",
    )


def _encoder(row: Measurement) -> str:
    return f"{row.family} {row.encoder}, {row.sizes}"


def _difference(what: str, value: float) -> str:
    """Shares of codes in percent; distances between embeddings as they are."""
    if what in ("max abs", "1-cos"):
        return f"{what} {value:.2g}"
    return f"{what} {100 * value:.1f} %"


def disturbance_table(rows: Sequence[Disturbance]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("decode-like loop", "step p50, ms", "p99, ms", "steps", "encodes"):
        table.add_column(heading, justify="left" if "loop" in heading else "right")
    for row in rows:
        p50, p99 = f"{row.p50_ms:.3f}", f"{row.p99_ms:.3f}"
        table.add_row(
            row.condition, p50, p99, f"{row.num_steps:,}", f"{row.num_encodes:,}"
        )
    return table


def file_name(run: Run) -> str:
    """As that of the benchmark's run, and beside it."""
    return f"{Path(run.file_name).stem}-precision.json"


def save(
    run: Run,
    rows: Sequence[Measurement],
    disturbances: Mapping[str, Sequence[Disturbance]],
    path: Path,
) -> None:
    """Write the run whole, a row a line; what was there is replaced.

    Args:
        disturbances: By encoder; empty without a GPU.

    Raises: StorageError.
    """
    head = run.plain()
    del head["rows"]
    head["disturbance"] = (
        "not measured: needs CUDA"
        if not disturbances
        else {
            name: [dataclasses.asdict(row) for row in found]
            for name, found in disturbances.items()
        }
    )
    lines = ",\n".join("  " + json.dumps(_plain(row)) for row in rows)
    text = json.dumps(head, indent=1).removesuffix("\n}")
    publish(path, f'{text},\n "rows": [\n{lines}\n ]\n}}\n'.encode())


def _plain(row: Measurement) -> dict[str, Any]:
    plain = dataclasses.asdict(row)
    plain["times_ms"] = [_short(ms) for ms in row.times_ms]
    plain["cpu_ms"] = [_short(ms) for ms in row.cpu_ms]
    plain["differences"] = {k: _short(v) for k, v in row.differences.items()}
    if row.times_ms:
        plain["median_ms"] = _short(row.median_ms)
        del plain["not_measured"]
        return plain
    names = ("family", "sizes", "encoder", "variant", "clip", "not_measured")
    return {name: plain[name] for name in names}


def _short(value: float) -> float:
    return float(f"{value:.4g}")
