"""``python -m benchmarks.precision``: what a reference encoder's precision is worth.

Calls each encoder's network on prepared input in float32, with TF32 (on a GPU), in
batches and in bfloat16, on checkpoints with random weights, and compares with what the
encoder itself gives. Prints one table; docs/precision.md says what it means.
"""

import argparse
import dataclasses
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from benchmarks.bench import clip
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.fish_speech import codec_encoder as fish_speech
from vllm_tts_cache.families.fish_speech.codec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from vllm_tts_cache.families.fish_speech.resample import resample as fish_resample
from vllm_tts_cache.families.load import load_reference_encoders
from vllm_tts_cache.families.qwen3_tts import codec_encoder as qwen3_codec
from vllm_tts_cache.families.qwen3_tts import speaker_encoder as qwen3_speaker
from vllm_tts_cache.families.qwen3_tts.resample import resample as qwen3_resample
from vllm_tts_cache.speaker.family import ReferenceEncoder
from vllm_tts_cache.speaker.precision import exact_float32
from vllm_tts_cache.testing.encoder_size import ENCODER_SIZES
from vllm_tts_cache.testing.families import FISH_SPEECH, QWEN3_TTS

FAMILIES = {family.name: family for family in (QWEN3_TTS, FISH_SPEECH)}
_ROOT = Path(__file__).parents[1]
_HEADINGS = "encoder", "variant", "clip", "ms", "CPU ms", "differs from float32"

Values = npt.NDArray[Any]


@contextmanager
def tf32(_device: torch.device) -> Iterator[None]:
    """TF32 in matrix products and convolutions, as a process may have it."""
    conv = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = conv


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to compute.

    Attributes:
        neighbours: Lengths of the other clips of the batch, relative to the clip's.
        around: What the computation runs in.
        dtype: Of the network and its input.
    """

    name: str
    neighbours: Sequence[float] = ()
    around: Callable[[torch.device], AbstractContextManager[None]] = exact_float32
    dtype: torch.dtype = torch.float32


# bfloat16 comes last, because it casts the network where it is.
VARIANTS = (
    Variant(name="float32 (ours)"),
    Variant(name="TF32 on", around=tf32),
    Variant(name="batch of 4, one length", neighbours=(1, 1, 1)),
    Variant(name="batch of 4, padded", neighbours=(0.5, 0.8, 1.25)),
    Variant(name="bfloat16", dtype=torch.bfloat16),
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Network:
    """One encoder's network, apart from what prepares its input.

    Attributes:
        module: Its weights.
        prepare: Audio -> ``(length, ...)`` float32, on the device.
        compute: ``(num_clips, length, ...)`` -> ``(num_clips, num_frames,
            num_codebooks)`` codes or ``(num_clips, hidden)`` embeddings.
        silence: What a shorter clip of a batch is filled up with.
        samples_per_frame: Of its input; None: it gives an embedding.
    """

    module: nn.Module
    prepare: Callable[[ReferenceAudio], Tensor]
    compute: Callable[[Tensor], Tensor]
    silence: float = 0.0
    samples_per_frame: int | None = None

    def values(self, batch: Tensor, length: int) -> Values:
        """What the first clip gets; it was ``length`` long before it was filled up."""
        computed = self.compute(batch)[0]
        if self.samples_per_frame is not None:
            computed = computed[: math.ceil(length / self.samples_per_frame)]
        # NumPy has no bfloat16; codes are integers already.
        return (computed if computed.dtype == torch.int64 else computed.float()).numpy(
            force=True
        )


def network_of(encoder: ReferenceEncoder) -> Network:
    """The network of an encoder that ``load_reference_encoders`` gave.

    Raises: TypeError if it is one that is not known here.
    """
    match encoder:
        case fish_speech.CodecEncoder():
            return _fish_codec(encoder)
        case qwen3_codec.CodecEncoder():
            return _qwen3_codec(encoder)
        case qwen3_speaker.SpeakerEncoder():
            return Network(
                module=encoder.network,
                prepare=lambda audio: encoder._mel(audio)[0].to(encoder.device),
                compute=encoder.network,
                silence=math.log(1e-5),  # the floor of its log-mel energies
            )
    raise TypeError(f"no network is known of {type(encoder).__name__}")


def _fish_codec(encoder: fish_speech.CodecEncoder) -> Network:
    quantizer: Any = encoder.network.quantizer

    def compute(batch: Tensor) -> Tensor:
        missing = -batch.shape[1] % SAMPLES_PER_FRAME
        latents = encoder.network.encoder(pad(batch, (0, missing)).unsqueeze(1))
        latents = quantizer.pre_module(quantizer.downsample(latents))
        semantic, semantic_codes, *_ = quantizer.semantic_quantizer(latents)
        _, residual_codes, *_ = quantizer.quantizer(latents - semantic)
        return torch.cat([semantic_codes, residual_codes], dim=1).mT

    return Network(
        module=encoder.network,
        prepare=lambda audio: fish_resample(audio, SAMPLE_RATE_HZ, encoder.device),
        compute=compute,
        samples_per_frame=SAMPLES_PER_FRAME,
    )


def _qwen3_codec(encoder: qwen3_codec.CodecEncoder) -> Network:
    def prepare(audio: ReferenceAudio) -> Tensor:
        samples = qwen3_resample(audio, encoder.sample_rate_hz)
        return torch.tensor(samples, device=encoder.device)

    def compute(batch: Tensor) -> Tensor:
        codes = encoder.network.encode(
            batch.unsqueeze(1), num_quantizers=encoder.num_codebooks, return_dict=False
        )[0]
        return codes.mT

    return Network(
        module=encoder.network,
        prepare=prepare,
        compute=compute,
        samples_per_frame=encoder.samples_per_frame,
    )


def difference(given: Values, expected: Values) -> str:
    """How far an encoding is from the right one, in words.

    Of codes ``(num_frames, num_codebooks)`` the shares that differ, of the first
    codebook and of all others; of an embedding its largest error and 1 - cosine.

    Raises: ValueError if the shapes differ.
    """
    if given.shape != expected.shape:
        raise ValueError(f"shape {given.shape} against {expected.shape}")
    if np.array_equal(given, expected):
        return "equal"
    if given.ndim == 2:
        differs = given != expected
        first, rest = differs[:, :1].mean(), differs[:, 1:].mean()
        return f"first codebook {first:.1%}, others {rest:.1%}"
    one, other = given.astype(np.float64), expected.astype(np.float64)
    # Not 1 minus the cosine, which has no digits left where they are nearly equal.
    between = one / np.linalg.norm(one) - other / np.linalg.norm(other)
    largest = np.abs(one - other).max()
    return f"max abs {largest:.2g}, 1-cos {between @ between / 2:.2g}"


def rows(
    encoder: ReferenceEncoder, device: torch.device, seconds: float, num_samples: int
) -> Iterator[tuple[str, ...]]:
    """Every variant on a clip; the last one leaves the network in bfloat16."""
    network, audio = network_of(encoder), _audio(seconds, 1)
    expected = np.asarray(next(iter(encoder.encode(audio).arrays.values())))
    for variant in VARIANTS:
        if variant.around is tf32 and device.type != "cuda":
            yield encoder.name, variant.name, f"{seconds:g} s", "needs CUDA", "", ""
            continue
        network.module.to(variant.dtype)
        input_ = network.prepare(audio)
        batch = _batch(network, input_, seconds, variant.neighbours).to(variant.dtype)
        took, cpu, values = [], [], expected
        with variant.around(device):
            for _ in range(1 + num_samples):  # the first one also chooses kernels
                began, cpu_began = time.perf_counter(), time.process_time()
                values = network.values(batch, len(input_))
                took.append(1e3 * (time.perf_counter() - began))
                cpu.append(1e3 * (time.process_time() - cpu_began))
        times = f"{np.median(took[1:]):,.1f}", f"{np.median(cpu[1:]):,.1f}"
        name = encoder.name, variant.name, f"{seconds:g} s"
        yield *name, *times, difference(values, expected)


def _batch(
    network: Network, input_: Tensor, seconds: float, neighbours: Sequence[float]
) -> Tensor:
    """The clip and its neighbours, filled up to the longest: ``(num_clips, ...)``."""
    every = [input_]
    for seed, relative in enumerate(neighbours, start=100):
        # A little longer than needed, then cut: lengths are rounded on the way.
        other = network.prepare(_audio(1.1 * relative * seconds, seed))
        every.append(other[: round(len(input_) * relative)])
    longest = max(map(len, every))
    after = [0, 0] * (input_.ndim - 1)
    return torch.stack(
        [
            pad(one, [*after, 0, longest - len(one)], value=network.silence)
            for one in every
        ]
    )


def _audio(seconds: float, seed: int) -> ReferenceAudio:
    """Not decoded by us, since a padded neighbour may be longer than we take."""
    samples, rate_hz = soundfile.read(io.BytesIO(clip(seconds, seed)), dtype="float32")
    return ReferenceAudio.of(np.asarray(samples, np.float32), rate_hz)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each row as soon as it is measured, since some take minutes."""
    given = _parser().parse_args(arguments)
    device = torch.device(given.device)
    print(f"| {' | '.join(_HEADINGS)} |\n|{' --- |' * len(_HEADINGS)}")
    for name in given.family or FAMILIES:
        family = FAMILIES[name]
        options = dataclasses.replace(family.options, encoders=given.encoders)
        family = dataclasses.replace(family, options=options)
        given.work.mkdir(parents=True, exist_ok=True)
        checkpoint = family.ensure_checkpoint(given.work / f"{name}-{given.encoders}")
        for encoder in family.encoders:
            for seconds in given.seconds:
                # Loaded anew: measuring casts it.
                loaded = load_reference_encoders(checkpoint, device)[encoder]
                for row in rows(loaded, device, seconds, given.samples):
                    print(f"| {name} {' | '.join(row)} |", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precision", description=__doc__
    )
    add = parser.add_argument
    add("--family", action="append", choices=list(FAMILIES), help="(both)")
    add("--encoders", choices=ENCODER_SIZES, default="tiny", help="(%(default)s)")
    add("--device", choices=devices, default=devices[0])
    add("--seconds", type=float, nargs="+", default=[3.0], help="of the clips (3)")
    add("--samples", type=int, default=2, help="timed runs of each (%(default)s)")
    add("--work", type=Path, default=_ROOT / ".work" / "precision")
    return parser


if __name__ == "__main__":
    sys.exit(main())
