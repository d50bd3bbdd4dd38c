"""Timing of short calls in this process."""

import gc
import time
from collections.abc import Callable, Sequence

MIN_SAMPLE_SECONDS = 0.002


def per_call_us(call: Callable[[], object], num_samples: int) -> list[float]:
    """Microseconds a call, each sample the mean over enough calls to be timed.

    The first sample is dropped. The garbage collector is off meanwhile.
    """
    num_calls = _enough(call)
    return [
        us / num_calls for us in each_us([_repeat(call, num_calls)], num_samples)[0]
    ]


def each_us(
    calls: Sequence[Callable[[], object]], num_samples: int
) -> list[list[float]]:
    """Microseconds of every single call, the calls taking turns; the first dropped."""
    samples: list[list[float]] = [[] for _ in calls]
    gc.disable()
    try:
        for _ in range(num_samples + 1):
            for found, call in zip(samples, calls, strict=True):
                began = time.perf_counter_ns()
                call()
                found.append((time.perf_counter_ns() - began) / 1e3)
    finally:
        gc.enable()
    return [found[1:] for found in samples]


def _enough(call: Callable[[], object]) -> int:
    num_calls = 1
    while True:
        began = time.perf_counter()
        _repeat(call, num_calls)()
        if time.perf_counter() - began >= MIN_SAMPLE_SECONDS:
            return num_calls
        num_calls *= 2


def _repeat(call: Callable[[], object], num_calls: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(num_calls):
            call()

    return repeated
