"""How long the decode loop waits beside an encode: a CUDA graph, replayed meanwhile."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.measure import percentile
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.model_executor.encode_work import EncodeDevice
from vllm_tts_cache.speaker.reference import ReferenceEncoder
from vllm_tts_cache.store.encoding import Encoding

Act = Callable[[], object]

# Of a decode step: many small kernels, one after the other, as of 4 requests.
_NUM_LAYERS, _WIDTH, _NUM_ROWS = 300, 2_560, 4
ALONE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Milliseconds from the begin of a replay to its end."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    num_replays: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Gaps":
        return cls(
            p50_ms=1e3 * percentile(seconds, 50),
            p99_ms=1e3 * percentile(seconds, 99),
            max_ms=1e3 * max(seconds),
            num_replays=len(seconds),
        )


def gaps_of(replay: Act, until: Callable[[], bool]) -> Gaps:
    """Replay, and wait for the end of it, until it is so; at least once."""
    seconds: list[float] = []
    while not seconds or not until():
        began = time.perf_counter()
        replay()
        seconds.append(time.perf_counter() - began)
    return Gaps.of(seconds)


def gaps_alone(replay: Act, num_seconds: float) -> Gaps:
    until = time.perf_counter() + num_seconds
    return gaps_of(replay, lambda: time.perf_counter() > until)


def gaps_beside(replay: Act, encode: Act, num_times: int = 3) -> Gaps:
    """Replay for as long as a thread takes to encode, so many times.

    Raises: whatever ``encode`` raises.
    """
    with _on_thread(encode, num_times) as is_done:
        return gaps_of(replay, is_done)


@contextmanager
def _on_thread(act: Act, num_times: int) -> Iterator[Callable[[], bool]]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(num_times):
                act()
        except BaseException as exc:  # noqa: BLE001  it is raised below
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: not thread.is_alive()
    finally:
        thread.join()
    if failures:
        raise failures[0]


# -------- CUDA


def on_encode_thread(
    encoder: ReferenceEncoder, clip: ReferenceAudio, device: torch.device
) -> Callable[[], Encoding]:
    """Encode a clip as the encode thread does: its stream, and its look at memory."""
    encode_device = EncodeDevice(device)
    return lambda: encode_device.run(encoder, clip)


def median_ms(act: Act, num_times: int = 5) -> float:
    """Milliseconds of one call, after a first one that is not counted."""
    seconds: list[float] = []
    for _ in range(num_times + 1):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return 1e3 * percentile(seconds[1:], 50)


def capture_beside(
    encode: Callable[[], Encoding], device: torch.device, num_times: int = 3
) -> list[Encoding]:
    """Capture and replay graphs for as long as a thread encodes; what it encoded."""
    found: list[Encoding] = []
    with _on_thread(lambda: found.append(encode()), num_times) as is_done:
        while not is_done():
            replay = Replay(device, 0)
            replay()
    return found


def cuda_gaps(encode: Act, as_served: Act, device: torch.device) -> Mapping[str, Gaps]:
    """Replays of a graph alone, and beside encodes at each priority of either.

    Their streams have the same priority in vLLM, the lowest, as in the second.

    Args:
        encode: Encodes on the stream that is current.
        as_served: Encodes as the encode thread of a server does.
    """
    lowest, highest = torch.cuda.Stream.priority_range()
    beside = {
        "beside an encode at low priority": (lowest, lowest),
        "beside an encode at high priority": (lowest, highest),
        "at high priority beside an encode at low": (highest, lowest),
    }
    encode()  # the first one loads kernels
    alone = Replay(device, lowest)
    gaps = {"alone": gaps_alone(alone, ALONE_SECONDS)}
    for name, (of_replay, of_encode) in beside.items():
        replay = Replay(device, of_replay)
        gaps[name] = gaps_beside(replay, _on_stream(encode, device, of_encode))
    gaps["beside the encode thread"] = gaps_beside(alone, as_served)
    return gaps


def _on_stream(act: Act, device: torch.device, priority: int) -> Act:
    stream = torch.cuda.Stream(device, priority=priority)

    def run() -> None:
        torch.cuda.set_device(device)
        with torch.cuda.stream(stream):
            act()
        stream.synchronize()

    return run


class Replay:
    """Replays a graph of a decode-like step on a stream of its own; waits for it."""

    def __init__(self, device: torch.device, priority: int):
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._graph = torch.cuda.CUDAGraph()
        step = decode_step(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for _ in range(3):  # libraries make their handles outside the graph
                step()
        self._stream.synchronize()
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._output = step()

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()


def decode_step(device: torch.device) -> Callable[[], torch.Tensor]:
    """A chain of small matrix products in bfloat16, as a talker's step is."""
    weights = torch.randn(8, _WIDTH, _WIDTH, device=device, dtype=torch.bfloat16)
    weights *= _WIDTH**-0.5
    x = torch.randn(_NUM_ROWS, _WIDTH, device=device, dtype=torch.bfloat16)

    def step() -> torch.Tensor:
        y = x
        with torch.inference_mode():
            for number in range(_NUM_LAYERS):
                y = torch.nn.functional.silu(y @ weights[number % len(weights)])
        return y

    return step
