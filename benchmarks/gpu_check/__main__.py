"""``python -m benchmarks.gpu_check``: what of the reference encoders only a GPU shows.

No engine runs. For each encoder of each family, on one device:

determinism  a clip gets the same bits first, again, after clips of other lengths, and
             in slices of time
float32      TF32 is off inside an encode whoever asked for it; how far the encoding is
             from a CPU's
memory       the peak by the length of the clip, beside what the encoder declares
time         of an encode on the encode thread, and whether CUDA graphs can be captured
             meanwhile
gaps         how long a CUDA graph's replay takes alone and beside an encode

Nothing is downloaded: without --model the weights are random. Without a GPU it says so
and ends with status 0; --device cpu runs what needs none. Status 1: a check fails.

Example:
  python -m benchmarks.gpu_check --encoders real --out gpu.json
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks import machine
from benchmarks.gpu_check.checks import CHECKS, Subject
from benchmarks.gpu_check.findings import Finding, Verdict, table
from benchmarks.gpu_check.without_vllm import use_without_vllm, vllm_works
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.files import publish
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir
from vllm_tts_cache.speaker.family import Family, family_of_checkpoint, trial_families
from vllm_tts_cache.speaker.precision import computed_on
from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize, TinyCheckpoint

CPU = torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and tell; 0 if no check fails, or none could be made."""
    given = _parser().parse_args(arguments)
    if (reason := why_not(given.device)) is not None:
        print(f"skipped: {reason}")
        return 0
    if not vllm_works():
        use_without_vllm()
    device = _with_index(torch.device(given.device))
    torch.set_num_threads(1)  # as the encode thread has; more encode without slices
    with _checkpoints(given) as checkpoints:
        findings = run(checkpoints, device, given.seconds)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(findings, f"{computed_on(device).device_name}, {device}"))
    if given.out is not None:
        content = {**described(device), "findings": [f.plain() for f in findings]}
        publish(given.out, (json.dumps(content, indent=2) + "\n").encode())
        print(f"written: {given.out}")
    return int(any(finding.verdict is Verdict.FAILS for finding in findings))


def why_not(device: str) -> str | None:
    """Say why nothing can be checked on a device, or None."""
    if torch.device(device).type != "cuda" or torch.cuda.is_available():
        return None
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{build} is built without CUDA; --device cpu runs what needs no GPU"
    return f"{build} sees no GPU; --device cpu runs what needs none"


def run(
    checkpoints: Sequence[tuple[Family, Path]],
    device: torch.device,
    lengths: Sequence[float],
) -> list[Finding]:
    """Every check of every encoder of these checkpoints."""
    findings: list[Finding] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        subjects = [s for c in checkpoints for s in _subjects(*c, device, lengths)]
        task = progress.add_task("checking", total=len(subjects) * len(CHECKS))
        for subject in subjects:
            for check in CHECKS:
                name = f"{subject.family} {subject.encoder.name}: {check.__name__}"
                progress.update(task, description=name)
                try:
                    findings += check(subject)
                except (EncodeError, RuntimeError) as exc:  # the others may work
                    findings.append(_broken(subject, check.__name__, exc))
                progress.advance(task)
    return findings


def described(device: torch.device) -> dict[str, Any]:
    """What was checked, and on what; nothing names the machine."""
    revision, is_dirty = machine.revision()
    cuda = {}
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device)
        cuda = {
            "capability": f"{has.major}.{has.minor}",
            "memory_bytes": has.total_memory,
            "num_multiprocessors": has.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return {
        "revision": revision + ("-dirty" if is_dirty else ""),
        "computed_by": asdict(computed_on(device)),
        "machine": machine.describe(),
        "versions": machine.versions(),
        **cuda,
    }


def _broken(subject: Subject, check: str, exc: Exception) -> Finding:
    why = str(exc).partition("\n")[0] or repr(exc)
    return subject.finding(check, why, Verdict.FAILS)


def _subjects(
    family: Family, checkpoint: Path, device: torch.device, lengths: Sequence[float]
) -> Iterator[Subject]:
    load = family.part("encoders_part")
    on_device, on_cpu = load(checkpoint, device), load(checkpoint, CPU)
    for name, encoder in on_device.items():
        yield Subject(
            family=family.name,
            encoder=encoder,
            on_cpu=on_cpu[name],
            device=device,
            lengths=lengths,
        )


@contextmanager
def _checkpoints(given: argparse.Namespace) -> Iterator[list[tuple[Family, Path]]]:
    """The one of --model, or one with random weights for each family."""
    if given.model is not None:
        folder = checkpoint_dir(given.model)
        family = family_of_checkpoint(folder)
        yield [(family, checkpoint_dir(given.model, side_files=family.side_files))]
        return
    trial = trial_families()
    names = given.family or list(trial)
    with tempfile.TemporaryDirectory() as work:
        yield [
            (family, _written(family, given.encoders, given.work or Path(work)))
            for family in dict.fromkeys(trial[name] for name in names)
        ]


def _written(family: Family, encoders: str, work: Path) -> Path:
    wanted = TinyCheckpoint(family, encoders=encoders)
    return wanted.ensure(work / f"{family.name}-{encoders}")


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="a torch device (cuda)")
    parser.add_argument(
        "--family", action="append", choices=trial_families(), help="only this one"
    )
    parser.add_argument(
        "--encoders",
        choices=get_args(EncoderSize),
        default="real",
        help="the size of those with random weights (real: as released; 2.3 GB)",
    )
    parser.add_argument(
        "--model", help="a downloaded checkpoint instead: a directory or an id"
    )
    parser.add_argument(
        "--seconds",
        nargs="+",
        type=float,
        # Of the first two, a slice is nearly as long as it can be, in some family.
        default=[1.9, 3.9, 10.0, 30.0],
        help="lengths of the clips that memory is measured with (1.9 3.9 10 30)",
    )
    parser.add_argument("--work", type=Path, help="keep the random checkpoints here")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="for us")
    return parser


if __name__ == "__main__":
    sys.exit(main())
