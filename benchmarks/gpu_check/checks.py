"""The checks of one encoder on one device, one after the other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu_check import determinism, memory, precision, replay
from benchmarks.gpu_check.clips import noise
from benchmarks.gpu_check.findings import Finding, Verdict
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.speaker.reference_encoder import ReferenceEncoder
from vllm_tts_cache.store.encoding import Encoding

# Of the clips that are compared; a second longer than two slices of any family.
SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked.

    Attributes:
        encoder: Computes on ``device``, and has encoded nothing yet.
        on_cpu: The same one, computing on a CPU.
        lengths: Seconds of the clips that memory is measured with.
    """

    family: str
    encoder: ReferenceEncoder
    on_cpu: ReferenceEncoder
    device: torch.device
    lengths: Sequence[float]

    def encode(self, audio: ReferenceAudio) -> Encoding:
        with torch.inference_mode():
            return self.encoder.encode(audio)

    def finding(self, check: str, found: str, verdict: Verdict, **more: Any) -> Finding:
        return Finding(
            family=self.family,
            encoder=self.encoder.name,
            check=check,
            found=found,
            verdict=verdict,
            **more,
        )


def history(subject: Subject) -> Iterator[Finding]:
    for when, is_same in determinism.same_after_others(subject.encode, SECONDS).items():
        yield _equality(subject, f"a clip {when}", is_same)
    is_same = determinism.same_in_one_slice(subject.encode, SECONDS)
    yield _equality(subject, "a clip in slices and whole", is_same)


def exactness(subject: Subject) -> Iterator[Finding]:
    found = precision.precisions(subject.device)
    yield subject.finding(
        "float32, though TF32 is asked for",
        ", ".join(f"{what}: {how}" for what, how in found.items()),
        Verdict.of(precision.are_exact(found)),
        expected="neither tf32 nor bf16",
        values=dict(found),
    )
    is_same = precision.same_with_tf32_asked_for(subject.encode, SECONDS)
    yield _equality(subject, "a clip where TF32 is asked for", is_same)
    clip = noise(SECONDS)
    with torch.inference_mode():
        expected = subject.on_cpu.encode(clip)
    encoding = subject.encode(clip)
    far = precision.distances(encoding, expected)
    yield subject.finding(
        "distance from a CPU's float32",
        ", ".join(f"{name}: {distance:.1e}" for name, distance in far.items()),
        Verdict.of(precision.are_near(encoding, far)),
        expected=f"<= {precision.MAX_DISTANCE:.0e}, of codes "
        f"{precision.MAX_OTHER_CODES:.0%}",
        values=dict(far),
    )


def need(subject: Subject) -> Iterator[Finding]:
    measured = memory.measure_need(subject.encoder, subject.device, subject.lengths)
    declared = subject.encoder.need
    peaks = measured.peaks.items()
    yield subject.finding(
        "memory of an encode",
        ", ".join(f"{s:g} s: {peak / memory.MIB:.0f} MiB" for s, peak in peaks)
        + f"; {_line(measured.fixed_bytes, measured.bytes_per_second)}",
        Verdict.of(all(peak <= declared.of(seconds) for seconds, peak in peaks)),
        expected=f"<= {_line(declared.fixed_bytes, declared.bytes_per_second)}",
        values={"measured": asdict(measured), "declared": asdict(declared)},
    )


def gaps(subject: Subject) -> Iterator[Finding]:
    """Nothing where no CUDA graph can be replayed."""
    if subject.device.type != "cuda":
        return
    clip = noise(max(subject.lengths))
    beside = replay.cuda_gaps(lambda: subject.encode(clip), subject.device)
    for name, found in beside.items():
        yield subject.finding(
            f"replay of a CUDA graph {name}",
            f"p50 {found.p50_ms:.2f}, p99 {found.p99_ms:.2f}, "
            f"longest {found.max_ms:.2f} ms of {found.num_replays}",
            Verdict.MEASURED,
            values=asdict(found),
        )


# Of history the first, because it begins with an encoder's first encode.
CHECKS: tuple[Callable[[Subject], Iterable[Finding]], ...] = (
    history,
    exactness,
    need,
    gaps,
)


def _equality(subject: Subject, check: str, is_same: bool) -> Finding:
    return subject.finding(
        check,
        "equal" if is_same else "other bits",
        Verdict.of(is_same),
        expected="equal",
    )


def _line(fixed_bytes: float, bytes_per_second: float) -> str:
    return (
        f"{fixed_bytes / memory.MIB:.1f} MiB + {bytes_per_second / memory.MIB:.2f} "
        "MiB a second"
    )
