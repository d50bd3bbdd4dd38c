"""What an encode does to a decode loop on the same GPU.

The loop replays a CUDA graph of a small transformer's step and waits for it, as a
decode loop waits for its token. Beside it a thread encodes again and again, on the
same stream, on one of its own, or on one of its own below the loop's.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Times of the loop's steps under one condition."""

    condition: str
    p50_ms: float
    p99_ms: float
    num_steps: int
    num_encodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Where the encode runs.

    Attributes:
        encodes_on: None for a loop that is alone.
        is_loop_urgent: Whether the loop's stream has the highest priority. A stream
            has the lowest unless it asks for more, so an encode can be put below
            the loop only by putting the loop above.
    """

    name: str
    encodes_on: Literal["same", "side"] | None
    is_loop_urgent: bool = False


CONDITIONS = (
    Condition(name="alone", encodes_on=None),
    Condition(name="encode on the same stream", encodes_on="same"),
    Condition(name="encode on a side stream", encodes_on="side"),
    Condition(name="urgent, alone", encodes_on=None, is_loop_urgent=True),
    Condition(
        name="urgent, encode on a low-priority side stream",
        encodes_on="side",
        is_loop_urgent=True,
    ),
)


def measure(
    encode: Callable[[], object], device: torch.device, seconds: float
) -> list[Disturbance]:
    """Every condition for that many seconds; ``encode`` does one whole encode."""
    encode()
    step = DecodeStep().to(device, torch.bfloat16)
    return [
        _under(condition, step, encode, device, seconds) for condition in CONDITIONS
    ]


def summary(condition: str, steps_ms: Sequence[float], num_encodes: int) -> Disturbance:
    """Raises: ValueError if there was no step."""
    if not steps_ms:
        raise ValueError(f"no step under {condition!r}")
    p50, p99 = np.percentile(steps_ms, (50, 99))
    return Disturbance(
        condition=condition,
        p50_ms=float(p50),
        p99_ms=float(p99),
        num_steps=len(steps_ms),
        num_encodes=num_encodes,
    )


class DecodeStep(nn.Module):
    """One token for each of several streams, over cached keys and values.

    About a small talker's size; the weights are random, since only time counts.
    """

    def __init__(
        self,
        *,
        num_layers: int = 28,
        hidden: int = 1024,
        num_heads: int = 16,
        num_streams: int = 8,
        num_cached: int = 512,
    ):
        super().__init__()
        self.layers = nn.ModuleList(
            _Layer(hidden, num_heads, num_streams, num_cached)
            for _ in range(num_layers)
        )
        self.input_shape = (num_streams, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """``(num_streams, hidden)`` to the same."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class _Layer(nn.Module):
    def __init__(self, hidden: int, num_heads: int, num_streams: int, num_cached: int):
        super().__init__()
        self._head_shape = (num_streams, num_heads, 1, hidden // num_heads)
        cached = (num_streams, num_heads, num_cached, hidden // num_heads)
        self.register_buffer("keys", torch.randn(cached))
        self.register_buffer("values", torch.randn(cached))
        self.norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query = self.query(self.norm(hidden)).view(self._head_shape)
        attended = functional.scaled_dot_product_attention(
            query, self.get_buffer("keys"), self.get_buffer("values")
        )
        hidden = hidden + self.out(attended.reshape(hidden.shape))
        gate, up = self.up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(functional.silu(gate) * up)


def _under(
    condition: Condition,
    step: DecodeStep,
    encode: Callable[[], object],
    device: torch.device,
    seconds: float,
) -> Disturbance:
    priority = -1 if condition.is_loop_urgent else 0
    stream = torch.cuda.Stream(device, priority=priority)
    # Captured on that stream, because a kernel in a graph keeps the priority of the
    # stream that it was captured on.
    graph = _capture(step, stream, device)
    side = stream if condition.encodes_on == "same" else torch.cuda.Stream(device)
    beside = _Encodes(encode, side) if condition.encodes_on else None
    if beside is not None:
        beside.start()
    try:
        steps_ms = _replay(graph, stream, seconds)
    finally:
        num_encodes = beside.end() if beside is not None else 0
    torch.cuda.synchronize(device)
    return summary(condition.name, steps_ms, num_encodes)


def _capture(
    step: DecodeStep, stream: torch.cuda.Stream, device: torch.device
) -> torch.cuda.CUDAGraph:
    hidden = torch.randn(step.input_shape, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                step(hidden)
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=stream):
            step(hidden)
    return graph


def _replay(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, seconds: float
) -> list[float]:
    """Milliseconds of each step, the wait for its end included."""
    steps_ms: list[float] = []
    done = torch.cuda.Event()
    end = time.perf_counter() + seconds
    with torch.cuda.stream(stream):
        while (began := time.perf_counter()) < end:
            graph.replay()
            done.record(stream)
            done.synchronize()
            steps_ms.append(1e3 * (time.perf_counter() - began))
    return steps_ms[NUM_WARM_UPS:]


class _Encodes:
    """Encodes one after another in a thread, as the encode queue would."""

    def __init__(self, encode: Callable[[], object], stream: torch.cuda.Stream):
        self._encode = encode
        self._stream = stream
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._num_encodes = 0
        self._error: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def end(self) -> int:
        """How many encodes ended; raises what the last one raised."""
        self._ending.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._num_encodes

    def _run(self) -> None:
        try:
            with torch.cuda.stream(self._stream):
                while not self._ending.is_set():
                    self._encode()
                    self._num_encodes += 1
        except Exception as exc:  # noqa: BLE001  # raised again where it is read
            self._error = exc
