"""Which networks, variants and clips a precision run measures, one after another."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import disturbance
from benchmarks.disturbance import Disturbance
from benchmarks.precision_clips import Clip, speech_clips, synthetic_clip
from benchmarks.precision_networks import Network, network_of
from benchmarks.precision_report import Measurement
from benchmarks.precision_variants import VARIANTS, Meter
from vllm_tts_cache.families.load import load_reference_encoders
from vllm_tts_cache.testing.encoder_size import EncoderSize
from vllm_tts_cache.testing.families import ServedFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and on what.

    Attributes:
        seconds: Lengths of synthetic clips, by size of the encoders.
        sizes_with_speech: Whose encoders also get the package's clips of speech.
        disturb_seconds: How long each condition of the decode loop lasts.
        work: Where checkpoints are written, and found again.
    """

    families: Sequence[ServedFamily]
    sizes: Sequence[EncoderSize]
    seconds: Mapping[str, Sequence[float]]
    sizes_with_speech: Sequence[str]
    meter: Meter
    disturb_seconds: float
    work: Path

    @property
    def has_gpu(self) -> bool:
        return self.meter.device.type == "cuda"

    @property
    def num_measurements(self) -> int:
        return sum(
            len(family.encoders) * len(VARIANTS) * len(self.clips(size))
            for family in self.families
            for size in self.sizes
        )

    def clips(self, size: str) -> list[Clip]:
        clips = [synthetic_clip(seconds) for seconds in self.seconds[size]]
        return clips + (speech_clips() if size in self.sizes_with_speech else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A network and which one it is."""

    network: Network
    family: str
    size: EncoderSize

    @property
    def label(self) -> str:
        return f"{self.family} {self.network.encoder.name}, {self.size}"


def subjects(plan: Plan, report: Callable[[str], None]) -> Iterator[Subject]:
    """Every encoder of every checkpoint; freshly loaded, since measuring spoils it."""
    for family in plan.families:
        for size in plan.sizes:
            report(f"loading {family.name}, {size}")
            directory = _checkpoint(family, size, plan.work)
            for encoder in load_reference_encoders(
                directory, plan.meter.device
            ).values():
                yield Subject(
                    network=network_of(encoder), family=family.name, size=size
                )


def measure(
    plan: Plan, subject: Subject, report: Callable[[str], None]
) -> Iterator[Measurement]:
    """Every variant on every clip; the last one leaves the network in bfloat16."""
    clips = plan.clips(subject.size)
    report(f"{subject.label}: as it is")
    expected = [plan.meter.expected(subject.network, clip) for clip in clips]
    for variant in VARIANTS:
        for clip, right in zip(clips, expected, strict=True):
            report(f"{subject.label}: {variant.name}, {clip.name}")
            row = plan.meter.measure(subject.network, variant, clip, right)
            yield dataclasses.replace(row, family=subject.family, sizes=subject.size)


def disturb(plan: Plan, subject: Subject) -> list[Disturbance]:
    """A decode loop beside encodes of the longest clip; needs a GPU."""
    longest = max(plan.clips(subject.size), key=lambda clip: clip.audio.seconds)
    return disturbance.measure(
        lambda: subject.network.encoder.encode(longest.audio),
        plan.meter.device,
        plan.disturb_seconds,
    )


def _checkpoint(family: ServedFamily, size: EncoderSize, work: Path) -> Path:
    """Its directory, written unless an equal one is there."""
    options = dataclasses.replace(family.options, encoders=size)
    family = dataclasses.replace(family, options=options)
    work.mkdir(parents=True, exist_ok=True)
    return family.ensure_checkpoint(work / f"{family.name}-{size}")
