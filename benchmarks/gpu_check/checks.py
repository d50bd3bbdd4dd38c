"""The checks of one encoder on one device, one after the other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu_check import determinism, memory, precision, replay
from benchmarks.gpu_check.clips import noise
from benchmarks.gpu_check.findings import Finding, Verdict
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.speaker.reference import ReferenceEncoder
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


def speed(subject: Subject) -> Iterator[Finding]:
    """How long an encode takes as the encode thread runs it; on a GPU alone."""
    if subject.device.type != "cuda":
        return
    found = {}
    for seconds in subject.lengths:
        clip = noise(seconds)
        encode = replay.on_encode_thread(subject.encoder, clip, subject.device)
        found[seconds] = replay.median_ms(encode)
    yield subject.finding(
        "time of an encode",
        ", ".join(f"{seconds:g} s: {ms:.1f} ms" for seconds, ms in found.items()),
        Verdict.MEASURED,
        values={"milliseconds": found},
    )


def captures(subject: Subject) -> Iterator[Finding]:
    """Whether a CUDA graph can be captured while the encode thread encodes."""
    if subject.device.type != "cuda":
        return
    clip = noise(max(subject.lengths))
    encode = replay.on_encode_thread(subject.encoder, clip, subject.device)
    expected = determinism.bits(encode())
    found = replay.capture_beside(encode, subject.device)
    is_same = all(determinism.bits(encoding) == expected for encoding in found)
    yield _equality(subject, "a clip while CUDA graphs are captured", is_same)


def shortage(subject: Subject) -> Iterator[Finding]:
    """Whether a clip is refused, and nothing else harmed, where a card is full."""
    clip = noise(max(subject.lengths))
    if subject.device.type != "cuda":
        return
    if not memory.peak_bytes(subject.device, lambda: subject.encode(clip)):
        return  # it computes on the CPU
    encode = replay.on_encode_thread(subject.encoder, clip, subject.device)
    expected = determinism.bits(encode())
    num_bytes = subject.encoder.need.of(clip.seconds) // 2
    with memory.filled(subject.device, but_for=num_bytes):
        refusal = memory.refusal(encode)
    yield subject.finding(
        "an encode that a full card has no room for",
        refusal or "it was encoded",
        Verdict.of("gpu_memory_utilization" in refusal),
        expected="a refusal that names gpu_memory_utilization",
    )
    is_same = determinism.bits(encode()) == expected
    yield _equality(subject, "a clip when there is room again", is_same)


def gaps(subject: Subject) -> Iterator[Finding]:
    """Nothing where no CUDA graph can be replayed."""
    if subject.device.type != "cuda":
        return
    clip = noise(max(subject.lengths))
    beside = replay.cuda_gaps(
        lambda: subject.encode(clip),
        replay.on_encode_thread(subject.encoder, clip, subject.device),
        subject.device,
    )
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
    speed,
    captures,
    shortage,
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
