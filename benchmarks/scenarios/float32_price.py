"""What encoding in float32 costs over bfloat16, in a process that does nothing else."""

from benchmarks import dtype_process, fresh_process
from benchmarks.bench import Bench
from benchmarks.models import QWEN3_TTS
from benchmarks.rows import Row, Summary

NAME = "float32_price"


def run(bench: Bench) -> list[Row]:
    """Networks of the released sizes; what prepares their input is float32 anyway."""
    bench.step(f"{NAME}: writing the checkpoint")
    checkpoint = QWEN3_TTS.checkpoint(bench.work)
    bench.step(f"{NAME}: each encoder in both dtypes")
    found = fresh_process.run(
        dtype_process.__name__, checkpoint, "--rounds", bench.num_rounds
    )
    return [
        Row(
            scenario=NAME,
            what=f"{name} network, {dtype_process.SECONDS} s of audio, float32",
            unit="ms",
            ours=Summary.of(took["float32"]),
            reference=Summary.of(took["bfloat16"]),
            versus="the same in bfloat16",
            note="one thread; the ratio is the CPU's",
        )
        for name, took in found.items()
    ]
